"""The optional C++ part; `python -m mirror_sd.backends.native.build_extension` builds it."""
