"""Use cases of templates: queries, names, tags and builds."""
