"""The seven kinds of Paddock as frozen structs, with codec, validation and schemas. No I/O."""
