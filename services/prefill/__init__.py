"""The prefill role: build missing blocks, publish them, hold them under a lease."""
