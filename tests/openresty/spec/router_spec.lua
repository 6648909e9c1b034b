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

    it("names the classes that must not take over what waits for others", function()
        local r = router.new(policy, ALL)
        assert.equal("", r:spared(nil))
        assert.equal("", r:spared({ cpu = 1, gpu = 0.5 }))
        assert.equal("gpu", r:spared({ cpu = 1, gpu = 0.49, tpu = 0.9 }))
        assert.equal("cpu,tpu", r:spared({ cpu = 0, gpu = 1, tpu = 0.4 }))
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

    it("moves what a hot class gives up out of a bucket that has no other class", function()
        local r = router.new(policy, { "cpu", "gpu" })
        local long, hot = { prompt_tokens = 1000 }, { factors = { gpu = 0.4 } }
        assert.same({ cpu = 0.6, gpu = 0.4 }, shares(r, long, hot))
        assert.same({ cpu = 0, gpu = 1 }, shares(r, long, { factors = { gpu = 1 } }))
        assert.same({ cpu = 0.1, gpu = 0.9 }, shares(r, long, { factors = { gpu = 0.9 } }))
        local counts = shares_of(function()
            return r:choose(long, hot)
        end, 1000)
        assert.is_true(math.abs(counts.gpu - 400) <= 1)
    end)

    it("keeps the bucket's traffic in it while one of its classes is well", function()
        local r = router.new(policy, ALL)
        local hot = { factors = { gpu = 0.4 } }
        assert.same({ cpu = 0, gpu = 0.211, tpu = 0.789 }, shares(r, { prompt_tokens = 50 }, hot))
        hot.factors.tpu = 0.5
        assert.same({ cpu = 0.5, gpu = 0.174, tpu = 0.326 }, shares(r, { prompt_tokens = 50 }, hot))
        hot.factors.cpu = 0.5
        assert.same({ cpu = 0, gpu = 0.348, tpu = 0.652 }, shares(r, { prompt_tokens = 50 }, hot))
    end)

    it("leaves a hot class its traffic where there is no other", function()
        local r = router.new(policy, { "gpu" })
        assert.same({ gpu = 1 }, shares(r, { prompt_tokens = 50 }, { factors = { gpu = 0.1 } }))
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

    it("multiplies by the headroom of a class whose places are known", function()
        local r = router.new(policy, { "cpu", "gpu" })
        local live = { slots = { cpu = 8, gpu = 32 }, in_flight = { cpu = 4, gpu = 8 } }
        local cpu, gpu = 0.7 * 0.5, 0.3 * 0.75
        local expected = { cpu = cpu / (cpu + gpu), gpu = gpu / (cpu + gpu) }
        for class, share in pairs(r:weigh({ prompt_tokens = 1 }, live).shares) do
            assert.is_true(math.abs(share - expected[class]) < 1e-9)
        end
    end)

    it("goes by the measured shares of the prompt's length, whatever the policy says", function()
        local r = router.new(policy, ALL)
        local splits = {
            { below = 100, shares = { cpu = 0.25, tpu = 0.75 } },
            { shares = { gpu = 1 } },
        }
        -- The factors are in these shares already.
        local live = { splits = splits, factors = { cpu = 0.1, tpu = 1 } }
        assert.same({ cpu = 0.25, gpu = 0, tpu = 0.75 }, shares(r, { prompt_tokens = 99 }, live))
        assert.same({ cpu = 0, gpu = 1, tpu = 0 }, shares(r, { prompt_tokens = 100 }, live))
        assert.equal("measured", r:weigh({ prompt_tokens = 100 }, live).rule)
        local run = shares_of(function()
            return (r:choose({ prompt_tokens = 10 }, live))
        end, 1000)
        assert.is_true(math.abs(run.cpu - 250) <= 1)
        local vip = r:weigh({ prompt_tokens = 10, tier = "vip" }, live)
        assert.equal("preferred", vip.rule)
    end)

    it("goes by the policy where the measured classes are full or not there", function()
        local live = { splits = { { shares = { tpu = 1 } } }, factors = { cpu = 0 } }
        local r = router.new(policy, { "cpu", "gpu" })
        assert.equal("policy", r:weigh({ prompt_tokens = 1 }, live).rule)
        assert.same({ cpu = 0, gpu = 1 }, shares(r, { prompt_tokens = 1 }, live))
        live.slots, live.in_flight = { tpu = 2 }, { tpu = 2 }
        r = router.new(policy, ALL)
        assert.same({ cpu = 0, gpu = 1, tpu = 0 }, shares(r, { prompt_tokens = 1 }, live))
    end)

    it("gives a full class nothing while another has room", function()
        local r = router.new(policy, ALL)
        local live = { slots = { cpu = 8 }, in_flight = { cpu = 8 } }
        assert.same({ cpu = 0, gpu = 1, tpu = 0 }, shares(r, { prompt_tokens = 1 }, live))
    end)

    it("spills to the other classes where those of the bucket are full", function()
        local r = router.new(policy, ALL)
        local live = { slots = { cpu = 8, gpu = 2, tpu = 4 }, in_flight = { cpu = 8, gpu = 2 } }
        local decision = r:weigh({ prompt_tokens = 1 }, live)
        assert.equal("spilled", decision.rule)
        assert.equal(1, decision.shares.tpu)
    end)

    it("goes by places for each request where all are full", function()
        local r = router.new(policy, { "cpu", "gpu" })
        local live = { slots = { cpu = 10, gpu = 10 }, in_flight = { cpu = 39, gpu = 19 } }
        local decision = r:weigh({ prompt_tokens = 1 }, live)
        assert.equal("full", decision.rule)
        assert.is_true(math.abs(decision.shares.cpu - 0.7 / (0.7 + 0.6)) < 1e-9)
    end)

    it("passes over a class at its cap, whatever places it has", function()
        local capped = {}
        for key, value in pairs(policy) do
            capped[key] = value
        end
        capped.caps = { cpu = 2 }
        local r = router.new(capped, { "cpu", "gpu" })
        local live = { slots = { cpu = 8 }, in_flight = { cpu = 2 } }
        assert.equal("gpu", r:choose({ prompt_tokens = 1 }, live))
    end)

    it("does not send to a class without workers", function()
        local r = router.new(policy, ALL)
        for _, tokens in ipairs({ 1, 1000 }) do
            local live = { slots = { gpu = 0 }, factors = { gpu = 0 } }
            for _ = 1, 20 do
                assert.not_equal("gpu", r:choose({ prompt_tokens = tokens }, live))
            end
        end
    end)

    it("changes the weights by the band of the rate", function()
        local banded = {}
        for key, value in pairs(policy) do
            banded[key] = value
        end
        banded.qps_bands = { { below = 10 }, { factors = { cpu = 0.5 }, spread = 0.4 } }
        banded.fallback = { tpu = 1 }
        local r = router.new(banded, ALL)
        local request = { prompt_tokens = 1, qps = 9.9 }
        assert.same({ cpu = 0.7, gpu = 0.3, tpu = 0 }, shares(r, request))
        request.qps = 10
        local expected = { cpu = 0.6 * 0.35 / 0.65, gpu = 0.6 * 0.3 / 0.65, tpu = 0.4 }
        for class, share in pairs(shares(r, request)) do
            assert.is_true(math.abs(share - expected[class]) < 0.001)
        end
    end)

    local VIP = { prompt_tokens = 10, tier = "vip" }
    local preferences = {
        { "the fastest", {}, "tpu", "preferred" },
        { "the fastest though it is full of others",
            { slots = { tpu = 4 }, in_flight = { tpu = 9 }, in_tier = { tpu = 3 } },
            "tpu", "preferred" },
        { "the next where that is full of its own",
            { slots = { tpu = 4 }, in_flight = { tpu = 4 }, in_tier = { tpu = 4 } },
            "gpu", "spilled" },
        { "the next where that is unhealthy", { factors = { tpu = 0.3 } }, "gpu", "preferred" },
        { "the least full where all are full",
            { slots = { cpu = 4, gpu = 4, tpu = 4 }, in_tier = { cpu = 9, gpu = 5, tpu = 7 } },
            "gpu", "full" },
        { "the fastest though the load is evened out", { factors = { tpu = 0.2 }, health = {} },
            "tpu", "preferred" },
        { "by weight where all are unhealthy", { factors = { cpu = 0.2, gpu = 0.1, tpu = 0.1 } },
            "cpu", "policy" },
    }
    for _, case in ipairs(preferences) do
        it("gives a VIP " .. case[1], function()
            local class, rule = router.new(policy, ALL):choose(VIP, case[2])
            assert.same({ case[3], case[4] }, { class, rule })
        end)
    end

    it("gives a VIP what there is where the stack has few classes", function()
        assert.equal("cpu", (router.new(policy, { "cpu" }):choose(VIP)))
    end)

    -- Two workers with mixed prompts; factors and load that change all the time.
    it("keeps the shares of 1,000 requests within 2 points of the weights", function()
        math.randomseed(11)
        local workers = { router.new(policy, ALL), router.new(policy, ALL) }
        local run = {}
        for index = 1, 4000 do
            local request = { prompt_tokens = math.random(100), qps = 150 * math.random() }
            local live = {
                factors = { gpu = index % 700 < 350 and 1 or 0.3 },
                slots = { cpu = 8, gpu = 32 },
                in_flight = { cpu = math.random(0, 7), gpu = math.random(0, 31) },
            }
            local worker = workers[math.random(2)]
            local shares_now = worker:weigh(request, live).shares
            run[index] = { worker:choose(request, live), shares_now }
        end
        for first = 1, 3001, 50 do
            local due = { cpu = 0, gpu = 0, tpu = 0 }
            for index = first, first + 999 do
                for class, share in pairs(run[index][2]) do
                    due[class] = due[class] + share
                end
                due[run[index][1]] = due[run[index][1]] - 1
            end
            for class, difference in pairs(due) do
                assert.is_true(math.abs(difference) <= 20, class .. " " .. difference)
            end
        end
    end)

    it("does not herd onto one class while a weight is old", function()
        local r = router.new(policy, { "cpu", "gpu" })
        local flight = { cpu = 0, gpu = 0 }
        local live = { slots = { cpu = 8, gpu = 32 }, in_flight = flight }
        for _ = 1, 40 do
            local class = r:choose({ prompt_tokens = 1 }, live)
            flight[class] = flight[class] + 1
        end
        assert.same({ cpu = 8, gpu = 32 }, flight)
    end)
end)
