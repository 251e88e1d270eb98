"""Lossless speculative decoding as three gRPC services; this package is what they share."""

__version__ = "0.1.0"
