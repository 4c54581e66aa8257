"""Generated from `proto/wire/v1` by `make proto`; checked against it in CI."""
