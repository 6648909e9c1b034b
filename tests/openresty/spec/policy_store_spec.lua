local fake_ngx = require("fake_ngx")
local policy = require("mirror.policy")
local policy_store = require("mirror.policy_store")
local ngx = ngx

local function text_with(caps)
    return ([[return {
    prompt_buckets = { { weights = { cpu = 1 } } },
    qps_bands = { {} }, fallback = { cpu = 1 }, tiers = {},
    caps = { cpu = %s },
    tokens_per_ascii_byte = 0.3, tokens_per_non_ascii_byte = 0.2,
}]]):format(caps)
end

describe("policy in force", function()
    local dict, text

    local function new()
        return policy_store.new(dict, function()
            if text then
                return text
            end
            return nil, "gone"
        end)
    end

    local function cap(store)
        return store:get().caps.cpu
    end

    before_each(function()
        dict, text = fake_ngx.dict(ngx.now), text_with(1)
    end)

    it("is the file's, and follows the file", function()
        local store = new()
        assert.is_true(store:reload())
        assert.equal(1, cap(store))
        assert.is_false(store:reload())
        text = text_with(2)
        assert.is_true(store:reload())
        assert.equal(2, cap(store))
    end)

    it("stays where the file turns bad, which is said once", function()
        local store = new()
        store:reload()
        text = text_with(-1)
        local is_loaded, sentence = store:reload()
        assert.is_nil(is_loaded)
        assert.matches("line 4: caps.cpu is %-1", sentence)
        assert.is_false(store:reload())
        text = nil
        assert.same({ nil, "policy: the file cannot be read: gone" }, { store:reload() })
        assert.is_false(store:reload())
        assert.equal(1, cap(store))
        text = text_with(3)
        assert.is_true(store:reload())
        assert.equal(3, cap(store))
    end)

    it("is the file's again where it was lost from the shared dict", function()
        new():reload()
        dict:delete("policy|text")
        local reloaded = new()
        assert.is_true(reloaded:reload())
        assert.equal(1, cap(reloaded))
    end)

    it("stays as an operator put it until the file changes, over a reload of nginx too", function()
        new():reload()
        new():put(policy)
        local reloaded = new()
        assert.is_false(reloaded:reload())
        assert.same(policy, (reloaded:get()))
        text = text_with(4)
        assert.is_true(reloaded:reload())
        assert.equal(4, cap(reloaded))
    end)
end)
