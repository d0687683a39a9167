"""Thin connectors for inference engines (vLLM, SGLang).

This folder is reached as `kvstore.connectors` through a relative link; the bare name is not a package.
"""

if __name__ == "connectors":
    raise ImportError("import kvstore.connectors instead of connectors: only `kvstore` is a package")
