"""The vocabulary every room speaks: values only, no I/O, no torch, no network."""
