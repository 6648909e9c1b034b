--- SHA-256, from the libcrypto that nginx itself is linked to.

local ffi = require("ffi")

ffi.cdef([[
unsigned char *SHA256(const unsigned char *data, size_t length, unsigned char *digest);
]])

local function library()
    local is_linked = pcall(function()
        return ffi.C.SHA256
    end)
    if is_linked then
        return ffi.C
    end
    for _, name in ipairs({ "libcrypto.so.3", "libcrypto.so.1.1", "crypto" }) do
        local is_loaded, found = pcall(ffi.load, name)
        if is_loaded then
            return found
        end
    end
    error("SHA-256 needs libcrypto, which is not there")
end

local crypto = library()
local buffer = ffi.new("unsigned char[32]")

--- The 32 bytes of the digest.
return function(text)
    crypto.SHA256(text, #text, buffer)
    return ffi.string(buffer, 32)
end
