"""The kinds as frozen structs, one module each."""
