local auth = require("mirror.auth")
local fake_ngx = require("fake_ngx")
local ngx = ngx

-- Stands for SHA-256: 32 bytes that depend on the text.
local function digest(text)
    return text:sub(1, 32) .. ("."):rep(32 - math.min(32, #text))
end

local function hex(text)
    return (digest(text):gsub(".", function(byte)
        return ("%02x"):format(byte:byte())
    end))
end

local function file_of(...)
    local entries = {}
    for index, key in ipairs({ ... }) do
        entries[index] = ('{"sha256": "%s", "tenant": "%s", "tier": "vip", "revoked": %s}')
            :format(hex(key[1]), key[2], tostring(key[3] or false))
    end
    return '{"version": 1, "keys": [' .. table.concat(entries, ",") .. "]}"
end

describe("auth", function()
    local text, dict

    before_each(function()
        dict = fake_ngx.dict(ngx.now)
    end)

    local function new(may_be_open)
        local a = auth.new(function()
            return text
        end, digest, may_be_open, dict)
        a:reload()
        return a
    end

    it("lets everybody in where there are no keys and it may be open", function()
        text = nil
        assert.same({ tenant = "default", tier = "standard" }, new(true):caller(nil))
        text = file_of()
        assert.same("default", new(true):caller("Bearer anything").tenant)
        assert.same({ "default" }, new(true):tenants())
    end)

    it("lets nobody in without keys where it may not be open", function()
        text = nil
        assert.same({ nil, "no_api_key" }, { new(false):caller(nil) })
        assert.same({ nil, "invalid_api_key" }, { new(false):caller("Bearer anything") })
    end)

    it("is not opened by a reload of nginx after the file has gone", function()
        text = file_of({ "msd-one", "acme" })
        new(true)
        text = nil
        local reloaded = auth.new(function() end, digest, true, dict)
        local is_loaded, reason = reloaded:reload()
        assert.is_nil(is_loaded)
        assert.matches("the file has gone", reason)
        text = file_of()
        new(true)
        text = nil
        assert.is_true(new(true):is_open())
    end)

    it("knows a caller by its key", function()
        text = file_of({ "msd-one", "acme" }, { "msd-two", "shop" }, { "msd-old", "shop", true })
        local a = new(true)
        assert.equal("acme", a:caller("Bearer msd-one").tenant)
        assert.equal("shop", a:caller("bearer  msd-two ").tenant)
        assert.same({ "acme", "shop" }, a:tenants())
        for header, name in pairs({
            ["Bearer msd-three"] = "invalid_api_key",
            ["Bearer msd-old"] = "key_revoked",
            ["Bearer "] = "no_api_key",
            ["Basic msd-one"] = "no_api_key",
            ["msd-one"] = "no_api_key",
            ["Bearer msd-one msd-two"] = "no_api_key",
            ["Bearer " .. ("x"):rep(9000)] = "invalid_api_key",
        }) do
            assert.same({ nil, name }, { a:caller(header) }, header:sub(1, 30))
        end
    end)

    it("follows the file, and keeps the keys of before where it is bad or gone", function()
        text = file_of({ "msd-one", "acme" })
        local a = new(true)
        assert.is_false(a:reload())
        text = file_of({ "msd-two", "acme" })
        assert.is_true(a:reload())
        assert.is_nil((a:caller("Bearer msd-one")))
        for _, bad in ipairs({ "{", "gone" }) do
            text = bad ~= "gone" and bad or nil
            local is_loaded, reason = a:reload()
            assert.is_nil(is_loaded)
            assert.is_string(reason)
            assert.is_false(a:reload())
            assert.equal("acme", a:caller("Bearer msd-two").tenant)
            assert.is_false(a:is_open())
        end
    end)

    it("is not open where every key has been revoked", function()
        text = file_of({ "msd-one", "acme", true })
        assert.is_false(new(true):is_open())
    end)
end)
