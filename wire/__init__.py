"""The gRPC contract: generated stubs in `wire.v1`, and the codec between them and `core`."""
