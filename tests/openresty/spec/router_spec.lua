local policy = require("mirror.policy")
local router = require("mirror.router")

local ALL = { "cpu", "gpu", "tpu" }

-- Shares to a thousandth.
local function shares(r, request, live)
    local rounded = {}
    for class, share in pairs(r:weigh(request, live or {}).shares) do
        rounded[class] = math.floor(share * 1000 + 0.5) / 1000
    end
    return rounded
end

local function shares_of(choices, count)
    local counts = {}
    for _ = 1, count do
        local class = choices()
        counts[class] = (counts[class] or 0) + 1
    end
    return counts
end

describe("router", function()
    it("gives everything to the only class that is there", function()
        local one = router.new(policy, { "cpu" })
        for _, tokens in ipairs({ 1, 49, 50, 100000 }) do
            assert.equal("cpu", one:choose({ prompt_tokens = tokens }))
        end
    end)

    it("takes the bucket whose bound exceeds the prompt", function()
        local r = router.new(policy, ALL)
        assert.same({ cpu = 0.7, gpu = 0.3, tpu = 0 }, shares(r, { prompt_tokens = 49 }))
        assert.same({ cpu = 0, gpu = 0.4, tpu = 0.6 }, shares(r, { prompt_tokens = 50 }))
    end)

    it("keeps to the weights within one request over any run of 1,000", function()
        local r = router.new(policy, ALL)
        for _ = 1, 3 do
            local counts = shares_of(function()
                return r:choose({ prompt_tokens = 10 })
            end, 1000)
            assert.is_true(math.abs(counts.cpu - 700) <= 1)
            assert.is_true(math.abs(counts.gpu - 300) <= 1)
            assert.is_nil(counts.tpu)
        end
    end)

    it("spreads the rarer class evenly between the others", function()
        local r = router.new(policy, ALL)
        local longest, run = 0, 0
        for _ = 1, 200 do
            run = r:choose({ prompt_tokens = 10 }) == "cpu" and run + 1 or 0
            longest = math.max(longest, run)
        end
        assert.is_true(longest <= 3)
    end)

    it("keeps the shares of each bucket apart", function()
        local r = router.new(policy, ALL)
        local long = shares_of(function()
            r:choose({ prompt_tokens = 10 })
            return r:choose({ prompt_tokens = 1000 })
        end, 500)
        assert.is_true(math.abs(long.tpu - 300) <= 1)
        assert.is_true(math.abs(long.gpu - 200) <= 1)
    end)

    it("lets the classes that are there share what absent ones leave", function()
        local r = router.new(policy, { "cpu", "gpu" })
        assert.same({ cpu = 0, gpu = 1 }, shares(r, { prompt_tokens = 1000 }))
    end)

    it("falls back where none of a bucket's classes is there", function()
        local r = router.new(policy, { "cpu" })
        assert.same({ cpu = 1 }, shares(r, { prompt_tokens = 1000 }))
    end)

    it("serves even where the fallback leaves nothing either", function()
        local table_without = {
            prompt_buckets = { { weights = { gpu = 1 } } },
            qps_bands = { {} },
            fallback = { gpu = 1 },
            tiers = {},
            caps = {},
        }
        local r = router.new(table_without, { "cpu", "tpu" })
        assert.same({ cpu = 0.5, tpu = 0.5 }, shares(r, { prompt_tokens = 1 }))
        assert.is_string(r:choose({ prompt_tokens = 1 }))
    end)

    it("multiplies by the live factors and ignores them where they leave nothing", function()
        local r = router.new(policy, { "cpu", "gpu" })
        local factors = { cpu = 0, gpu = 1 }
        assert.same({ cpu = 0, gpu = 1 }, shares(r, { prompt_tokens = 1 }, { factors = factors }))
        assert.equal("gpu", r:choose({ prompt_tokens = 1 }, { factors = { cpu = 0 } }))
        factors = { cpu = 0, gpu = 0 }
        assert.same(
            { cpu = 0.7, gpu = 0.3 }, shares(r, { prompt_tokens = 1 }, { factors = factors })
        )
    end)

    it("never chooses a class without a share, whatever its past turns", function()
        local r = router.new(policy, { "cpu", "gpu" })
        for _ = 1, 7 do
            r:choose({ prompt_tokens = 1 })
        end
        for _ = 1, 50 do
            assert.equal("gpu", r:choose({ prompt_tokens = 1 }, { factors = { cpu = 0 } }))
        end
    end)
end)
