--- Who asks: an API key to a tenant, its tier and its limits.

local key_ring = require("mirror.key_ring")
local match = string.match

local _M = {}
local Auth = {}
Auth.__index = Auth

local KEY_BYTES = 512
local ANYBODY = { tenant = "default", tier = "standard" }

-- In the shared dict, which outlives a reload of nginx: the file has had keys.
local KNOWN = "keys|known"

--- `read()` gives the text of the keys' file, or nil where there is none; `digest(text)` is
-- SHA-256. `may_be_open`: without keys everybody is let in, as tenant "default". `dict`: a shared
-- dict.
function _M.new(read, digest, may_be_open, dict)
    local auth = { read = read, digest = digest, may_be_open = may_be_open, dict = dict }
    auth.ring = key_ring.empty()
    return setmetatable(auth, Auth)
end

--- Read the keys again where their file has changed. True, false where it has not, or nil and why
-- the keys of before stay: a file that is bad, or has gone, opens nothing and locks nobody out.
function Auth:reload()
    local text = self.read()
    local is_lost = text == nil and self.ring.count == 0 and self.dict:get(KNOWN) or false
    if text == self.text and not is_lost then
        return false
    end
    self.text = text
    if text == nil then
        return nil, "keys: the file has gone; the keys that were in it still hold"
    end
    local ring, reason = key_ring.parse(text)
    if not ring then
        return nil, reason
    end
    self.ring = ring
    self.dict:set(KNOWN, ring.count > 0)
    return true
end

function Auth:is_open()
    return self.may_be_open and self.ring.count == 0
end

--- The tenants that have keys.
function Auth:tenants()
    return self:is_open() and { ANYBODY.tenant } or self.ring.tenants
end

--- The caller of a request with this `Authorization` header or nil (see `KeyRing:find`); or nil and
-- the name of the refusal.
function Auth:caller(authorization)
    if self:is_open() then
        return ANYBODY
    end
    local key = authorization and match(authorization, "^[Bb][Ee][Aa][Rr][Ee][Rr] +(%S+)%s*$")
    if not key then
        return nil, "no_api_key"
    end
    local caller = #key <= KEY_BYTES and self.ring:find(self.digest(key))
    if not caller then
        return nil, "invalid_api_key"
    end
    if caller.is_revoked then
        return nil, "key_revoked"
    end
    return caller
end

return _M
