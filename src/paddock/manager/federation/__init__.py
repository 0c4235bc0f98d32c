"""Federation: claims and calls between the control planes of several clusters."""
