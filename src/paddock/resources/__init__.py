"""The seven kinds as frozen structs, with codec, selectors, validation and schemas. No I/O."""
