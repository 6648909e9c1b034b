local cjson = require("cjson")
local policy = require("mirror.policy")
local policy_rules = require("mirror.policy_rules")

local function changed(change)
    local copy = {
        prompt_buckets = {
            { below = 50, weights = { cpu = 0.7, gpu = 0.3 } },
            { weights = { tpu = 0.6, gpu = 0.4 } },
        },
        qps_bands = { { below = 10 }, { factors = { cpu = 0.5 }, spread = 0.1 } },
        fallback = { cpu = 1 },
        tiers = { vip = { prefer = { "gpu", "cpu" } } },
        caps = { cpu = 4 },
        tokens_per_ascii_byte = 0.3,
        tokens_per_non_ascii_byte = 0.2,
    }
    change(copy)
    return copy
end

describe("policy", function()
    it("ships a table that is valid", function()
        assert.is_true(policy_rules.validate(policy))
    end)

    local refused = {
        { "prompt_buckets", function(p) p.prompt_buckets = {} end },
        { "prompt_buckets is nil", function(p) p.prompt_buckets = nil end },
        { "prompt_buckets%[1%]", function(p) p.prompt_buckets[1] = 3 end },
        { "prompt_buckets%[1%]%.below is nil", function(p) p.prompt_buckets[1].below = nil end },
        { "prompt_buckets%[1%]%.below is 0", function(p) p.prompt_buckets[1].below = 0 end },
        { "prompt_buckets%[2%]%.below is 90", function(p) p.prompt_buckets[2].below = 90 end },
        {
            "prompt_buckets%[2%]%.below is 40; it must be a number above 50",
            function(p)
                p.prompt_buckets[3] = p.prompt_buckets[2]
                p.prompt_buckets[2] = { below = 40, weights = { cpu = 1 } }
            end,
        },
        { "%[1%]%.wieghts: there is no", function(p) p.prompt_buckets[1].wieghts = {} end },
        { "%[1%]%.weights is nil", function(p) p.prompt_buckets[1].weights = nil end },
        { "weights%.cpu is %-1", function(p) p.prompt_buckets[1].weights.cpu = -1 end },
        { "weights%.cpu is inf", function(p) p.prompt_buckets[1].weights.cpu = math.huge end },
        { "weights%.cpu is %-?nan", function(p) p.prompt_buckets[1].weights.cpu = 0 / 0 end },
        { 'weights%.cpu is "1";', function(p) p.prompt_buckets[1].weights.cpu = "1" end },
        { "weights%.abacus: there is", function(p) p.prompt_buckets[1].weights.abacus = 1 end },
        { "weights%.cpu is 10000000;", function(p) p.prompt_buckets[1].weights.cpu = 1e7 end },
        { "factors%.cpu is 1e%+300", function(p) p.qps_bands[2].factors.cpu = 1e300 end },
        { "tokens_per_ascii_byte is 5", function(p) p.tokens_per_ascii_byte = 5 end },
        { "prefer is a list with", function(p) p.tiers.vip.prefer = { "gpu", [3] = "cpu" } end },
        {
            "prompt_buckets is a list of 65",
            function(p)
                for index = 1, 65 do
                    p.prompt_buckets[index] = { below = index, weights = { cpu = 1 } }
                end
                p.prompt_buckets[65].below = nil
            end,
        },
        { "weights must add up", function(p) p.prompt_buckets[1].weights = { cpu = 0 } end },
        { "fallback is nil", function(p) p.fallback = nil end },
        { "tokens_per_ascii_byte is 0", function(p) p.tokens_per_ascii_byte = 0 end },
        { "qps_bands is nil", function(p) p.qps_bands = nil end },
        { "qps_bands is a table; it must be a list", function(p) p.qps_bands = {} end },
        { "qps_bands%[2%]%.below is 3", function(p) p.qps_bands[2].below = 3 end },
        { "qps_bands%[2%]%.spread is 1%.1", function(p) p.qps_bands[2].spread = 1.1 end },
        { "factors%.cpu is %-1", function(p) p.qps_bands[2].factors.cpu = -1 end },
        { "tiers is nil", function(p) p.tiers = nil end },
        { "tiers%.gold: there is no such key", function(p) p.tiers.gold = {} end },
        { 'prefer%[2%] is "abacus"', function(p) p.tiers.vip.prefer[2] = "abacus" end },
        { 'prefer%[2%] is "gpu"; each class', function(p) p.tiers.vip.prefer[2] = "gpu" end },
        { "healthy_factor is 2", function(p) p.tiers.vip.healthy_factor = 2 end },
        { "caps%.cpu is 0", function(p) p.caps.cpu = 0 end },
        { "caps%.cpu is 1%.5", function(p) p.caps.cpu = 1.5 end },
        { "caps is null", function(p) p.caps = cjson.null end },
        { "%[3%]: there is no such key", function(p) p[3] = 1 end },
        { "colour: there is no such key", function(p) p.colour = 1 end },
    }
    for _, case in ipairs(refused) do
        it("refuses a table with the fault: " .. case[1], function()
            local is_valid, sentence = policy_rules.validate(changed(case[2]))
            assert.is_nil(is_valid)
            assert.matches(case[1], sentence)
        end)
    end

    it("may begin with the mark of an editor on Windows", function()
        assert.is_table(policy_rules.from_json("\239\187\191" .. cjson.encode(policy)))
    end)

    it("refuses a text that would take long to check", function()
        for _, parse in ipairs({ policy_rules.from_lua, policy_rules.from_json }) do
            local value, sentence = parse((" "):rep(policy_rules.BYTES_MAX + 1))
            assert.is_nil(value)
            assert.equal("policy: it has more than 65536 bytes", sentence)
        end
    end)

    it("refuses what is not a table at all", function()
        assert.is_nil(policy_rules.validate(nil))
        assert.is_nil(policy_rules.validate("cpu"))
    end)

    local TEXT = [[
-- The policy of the shop.
return {
    prompt_buckets = {
        { below = 50, weights = { cpu = 0.7, gpu = 0.3 } },
        {
            weights = { tpu = 0.6 },
        },
    },
    qps_bands = { {} },
    fallback = { cpu = 1 },
    tiers = {},
    caps = {},
    tokens_per_ascii_byte = 0.3,
    tokens_per_non_ascii_byte = 0.2,
}
]]

    it("is read from a Lua text", function()
        local read = assert(policy_rules.from_lua(TEXT))
        assert.equal(0.7, read.prompt_buckets[1].weights.cpu)
    end)

    it("reads the file that comes with the project as the table that it is", function()
        local file = assert(io.open("openresty/lua/mirror/policy.lua"))
        assert.same(policy, policy_rules.from_lua(file:read("*a")))
        file:close()
    end)

    local faults = {
        { "gpu = 0.3", "gpu = -0.3", "line 4: prompt_buckets%[1%]%.weights%.gpu is %-0%.3" },
        { "tpu = 0.6", "npu = 0.6", "line 6: prompt_buckets%[2%]%.weights%.npu: there is no" },
        { "weights = { tpu = 0.6 },", "", "line 5: prompt_buckets%[2%]%.weights is nil" },
        { "caps = {},", "caps = { cpu = 'x' },", 'line 12: caps%.cpu is "x"' },
        { "fallback = { cpu = 1 },", "", "line 2: fallback is nil" },
        { "below = 50,", "below = 50", "line 4: expected a comma or }, found weights" },
        { "tiers = {},", "tiers = os.exit(1),", "line 11: os is not a value" },
    }
    for _, fault in ipairs(faults) do
        it("names the line at fault where " .. fault[2] .. " is written", function()
            local first, last = TEXT:find(fault[1], 1, true)
            local text = TEXT:sub(1, first - 1) .. fault[2] .. TEXT:sub(last + 1)
            local read, sentence = policy_rules.from_lua(text)
            assert.is_nil(read)
            assert.matches(fault[3], sentence)
        end)
    end

    it("goes through JSON and back", function()
        assert.same(policy, policy_rules.from_json(cjson.encode(policy)))
    end)

    it("is refused as JSON with the key at fault", function()
        assert.matches("not JSON", select(2, policy_rules.from_json("{")))
        assert.matches("prompt_buckets is nil", select(2, policy_rules.from_json("{}")))
        assert.matches("the policy is null", select(2, policy_rules.from_json("null")))
    end)
end)
