"""Back ends: what runs a `uir.Program` on a device."""
