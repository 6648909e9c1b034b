--- The API keys of the file that `mirror-sd key` writes: only their SHA-256 is in it.

local cjson = require("cjson.safe")
local validation = require("mirror.validation")

local _M = {}
local KeyRing = {}
KeyRing.__index = KeyRing

local TIERS = { vip = true, standard = true }
local LIMITS = { "concurrency", "requests_per_minute", "tokens_per_minute" }

local function refuse(path, allowed)
    validation.fail(path .. ": " .. allowed, path)
end

local function limit_of(path, entry, name)
    local value = entry[name]
    if value == nil or value == cjson.null then
        return nil
    end
    if type(value) ~= "number" or value < 1 or value % 1 ~= 0 or value > 2 ^ 53 then
        refuse(path .. "." .. name, "it must be a whole number of at least 1, or null")
    end
    return value
end

local function digest_of(path, hex)
    if type(hex) ~= "string" or #hex ~= 64 or hex:find("[^%x]") then
        refuse(path .. ".sha256", "it must be 64 hexadecimal digits")
    end
    return (hex:gsub("%x%x", function(byte)
        return string.char(tonumber(byte, 16))
    end))
end

local function caller_of(path, entry)
    if type(entry) ~= "table" then
        refuse(path, "it must be an object")
    end
    local tenant = entry.tenant
    if type(tenant) ~= "string" or #tenant < 1 or #tenant > 64 or tenant:find("[^%w._-]") then
        refuse(path .. ".tenant", "it must be 1 to 64 letters, digits, '.', '_' or '-'")
    end
    if not TIERS[entry.tier] then
        refuse(path .. ".tier", "it must be vip or standard")
    end
    local revoked = entry.revoked
    if revoked ~= nil and type(revoked) ~= "boolean" then
        refuse(path .. ".revoked", "it must be true or false")
    end
    local caller = {
        tenant = tenant,
        tier = entry.tier,
        is_revoked = revoked == true,
    }
    for _, name in ipairs(LIMITS) do
        caller[name] = limit_of(path, entry, name)
    end
    return caller
end

local function parse(text)
    local document, reason = cjson.decode(text)
    if type(document) ~= "table" then
        refuse("the file", "it is not JSON: " .. tostring(reason))
    end
    if document.version ~= 1 or type(document.keys) ~= "table" then
        refuse("the file", "it must be an object with version 1 and a list of keys")
    end
    for key in pairs(document.keys) do
        -- An object would look like an empty list, which lets everybody in.
        if type(key) ~= "number" then
            refuse("keys", "it must be a list")
        end
    end
    local ring = { by_digest = {}, count = 0, tenants = {} }
    local seen = {}
    for index, entry in ipairs(document.keys) do
        local path = "keys[" .. index .. "]"
        local caller = caller_of(path, entry)
        local digest = digest_of(path, entry.sha256)
        if ring.by_digest[digest] then
            refuse(path .. ".sha256", "another key has the same")
        end
        ring.by_digest[digest], ring.count = caller, index
        if not seen[caller.tenant] then
            seen[caller.tenant] = true
            ring.tenants[#ring.tenants + 1] = caller.tenant
        end
    end
    return setmetatable(ring, KeyRing)
end

--- The ring in `text`, or nil and a sentence that names the key at fault.
function _M.parse(text)
    local is_parsed, result = validation.run("keys", parse, text)
    if is_parsed then
        return result
    end
    return nil, result
end

--- A ring without keys.
function _M.empty()
    return setmetatable({ by_digest = {}, count = 0, tenants = {} }, KeyRing)
end

--- `{tenant, tier, is_revoked, concurrency, requests_per_minute, tokens_per_minute}` of the key
-- whose SHA-256 is `digest` (32 bytes), or nil. Limits are nil where there is none.
function KeyRing:find(digest)
    return self.by_digest[digest]
end

return _M
