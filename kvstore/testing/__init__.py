"""For tests of backends and connectors: a conformance suite, faulty wrappers, a real daemon. Not for production."""
