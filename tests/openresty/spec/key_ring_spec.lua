local cjson = require("cjson")
local key_ring = require("mirror.key_ring")

local HEX = ("0a"):rep(32)

local function text_with(entry, more)
    local key = { id = "k_1", sha256 = HEX, tenant = "acme", tier = "vip", concurrency = 4,
        requests_per_minute = cjson.null, revoked = false }
    for name, value in pairs(entry or {}) do
        key[name] = value
    end
    local document = { version = 1, keys = { key } }
    for name, value in pairs(more or {}) do
        document[name] = value
    end
    return cjson.encode(document)
end

describe("key ring", function()
    it("finds a caller by the digest of its key", function()
        local ring = assert(key_ring.parse(text_with()))
        assert.same(
            { tenant = "acme", tier = "vip", concurrency = 4, is_revoked = false },
            ring:find(("\010"):rep(32))
        )
        assert.is_nil(ring:find(("\011"):rep(32)))
        assert.equal(1, ring.count)
        assert.same({ "acme" }, ring.tenants)
    end)

    it("may be empty", function()
        assert.equal(0, key_ring.parse('{"version": 1, "keys": []}').count)
    end)

    for name, text in pairs({
        ["the file: it is not JSON"] = "{",
        ["the file: it must be"] = text_with({}, { version = 2 }),
        ["keys: it must be a list"] = '{"version": 1, "keys": {"a": 1}}',
        ["keys[1]: it must be an object"] = '{"version": 1, "keys": [7]}',
        ["keys[1].tenant"] = text_with({ tenant = "a b" }),
        ["keys[1].tier"] = text_with({ tier = "gold" }),
        ["keys[1].sha256: it must be"] = text_with({ sha256 = "xyz" }),
        ["keys[1].concurrency"] = text_with({ concurrency = 0 }),
        ["keys[1].tokens_per_minute"] = text_with({ tokens_per_minute = 1.5 }),
        ["keys[1].revoked"] = text_with({ revoked = "true" }),
        ["keys[2].sha256: another"] = '{"version": 1, "keys": ['
            .. ('{"sha256": "%s", "tenant": "a", "tier": "vip"},'):format(HEX)
            .. ('{"sha256": "%s", "tenant": "a", "tier": "vip"}]}'):format(HEX),
    }) do
        it("refuses a file with the fault " .. name, function()
            local ring, sentence = key_ring.parse(text)
            assert.is_nil(ring)
            assert.is_truthy(sentence:find("keys: " .. name, 1, true), sentence)
        end)
    end
end)
