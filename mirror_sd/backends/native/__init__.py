"""The CPU engine in C++ (`mirror_sd._native`)."""
