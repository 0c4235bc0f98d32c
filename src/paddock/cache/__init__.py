"""The typed read side of the domain: indexed lookups and wait tasks over informers."""
