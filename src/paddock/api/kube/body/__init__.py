"""Request bodies of the declarative API: decoding, patches, server-side apply."""
