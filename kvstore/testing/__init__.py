"""What tests of backends and connectors need: a conformance suite, faulty wrappers, a real daemon. Not for production."""
