local policy = require("mirror.policy")

local function changed(change)
    local copy = {
        prompt_buckets = {
            { below = 50, weights = { cpu = 0.7, gpu = 0.3 } },
            { weights = { tpu = 0.6, gpu = 0.4 } },
        },
        fallback = { cpu = 1 },
        tokens_per_ascii_byte = 0.3,
        tokens_per_non_ascii_byte = 0.2,
    }
    change(copy)
    return copy
end

describe("policy", function()
    it("ships a table that is valid", function()
        assert.is_true(policy.validate(policy.default))
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
        { "prompt_buckets%[1%] is wieghts", function(p) p.prompt_buckets[1].wieghts = {} end },
        { "%[1%]%.weights is nil", function(p) p.prompt_buckets[1].weights = nil end },
        { "weights%.cpu is %-1", function(p) p.prompt_buckets[1].weights.cpu = -1 end },
        { "weights%.cpu is inf", function(p) p.prompt_buckets[1].weights.cpu = math.huge end },
        { "weights%.cpu is %-?nan", function(p) p.prompt_buckets[1].weights.cpu = 0 / 0 end },
        { "weights%.cpu is 1", function(p) p.prompt_buckets[1].weights.cpu = "1" end },
        { "weights is abacus", function(p) p.prompt_buckets[1].weights.abacus = 1 end },
        { "weights is 0", function(p) p.prompt_buckets[1].weights = { cpu = 0 } end },
        { "fallback is nil", function(p) p.fallback = nil end },
        { "tokens_per_ascii_byte is 0", function(p) p.tokens_per_ascii_byte = 0 end },
        { "qps_bands", function(p) p.qps_bands = {} end },
    }
    for _, case in ipairs(refused) do
        it("refuses a table with the fault: " .. case[1], function()
            local is_valid, sentence = policy.validate(changed(case[2]))
            assert.is_nil(is_valid)
            assert.matches(case[1], sentence)
        end)
    end

    it("refuses what is not a table at all", function()
        assert.is_nil(policy.validate(nil))
        assert.is_nil(policy.validate("cpu"))
    end)
end)
