local explanation = require("mirror.explanation")
local policy = require("mirror.policy")
local router = require("mirror.router")

local function explain(request, live, classes)
    local r = router.new(policy, classes or { "cpu", "gpu" })
    local sentences, class = explanation.of(r, request, {
        factors = live.factors or {},
        slots = live.slots or {},
        in_flight = live.in_flight or {},
        in_tier = live.in_tier or {},
        splits = live.splits,
        degrade_level = live.degrade_level or 0,
        is_stale = live.is_stale or false,
    })
    return table.concat(sentences, "\n"), class, r
end

describe("explanation", function()
    it("says bucket, band, factors, headroom and the choice", function()
        local text, class = explain({ prompt_tokens = 30, qps = 10, tier = "standard" }, {
            factors = { gpu = 0.4 }, slots = { cpu = 8 }, in_flight = { cpu = 2 },
        })
        assert.equal("cpu", class)
        for _, part in ipairs({
            "30 prompt tokens fall in bucket 1 (below 50), whose weights are: cpu 0.7, gpu 0.3.",
            "10 requests a second fall in band 1 (below 100), which changes nothing.",
            "The probe's factors are: gpu 0.40.",
            "cpu has 2 requests at present; its headroom is 0.75.",
            "Shares are policy weight x factor x headroom: cpu 0.814, gpu 0.186.",
            "The next such request goes to cpu.",
        }) do
            assert.is_truthy(text:find(part, 1, true), part .. "\nis not in\n" .. text)
        end
    end)

    local cases = {
        { "no tpu; the classes that are there", { prompt_tokens = 90, qps = 1 }, {} },
        { "band 2 (the rest): factors cpu 0.8; 0.1 of the requests", { qps = 500 }, {} },
        { "no weight document of the last 5 seconds", {}, { is_stale = true } },
        { "standard requests are refused with a 503", {}, { degrade_level = 3 } },
        { "level is 2; the class does not depend", {}, { degrade_level = 2 } },
        { "that is healthy, in the order gpu, cpu", { tier = "vip" }, {} },
        {
            "its own requests fill the first of these, so the next",
            { tier = "vip" },
            { slots = { gpu = 1 }, in_flight = { gpu = 1 }, in_tier = { gpu = 1 } },
        },
        {
            "No class has room",
            {},
            { slots = { cpu = 1, gpu = 1 }, in_flight = { cpu = 1, gpu = 1 } },
        },
        {
            "so better ones take a part: cpu 0.600, gpu 0.400",
            { prompt_tokens = 90 },
            { factors = { gpu = 0.4 } },
        },
        {
            "those of the measured devices (scheduler.split) x headroom, in place of the policy's:"
                .. " cpu 0.250, gpu 0.750",
            {},
            { splits = { { shares = { cpu = 1, gpu = 3 } } } },
        },
        { "so they are ignored", {}, { factors = { cpu = 0, gpu = 0 } } },
    }
    for _, case in ipairs(cases) do
        it("says: " .. case[1], function()
            local request = { prompt_tokens = 30, qps = 10, tier = "standard" }
            for key, value in pairs(case[2]) do
                request[key] = value
            end
            local text = explain(request, case[3])
            assert.is_truthy(text:find(case[1], 1, true), text)
        end)
    end

    it("takes no turn", function()
        local _, first, r = explain({ prompt_tokens = 1, qps = 1, tier = "standard" }, {})
        for _ = 1, 5 do
            assert.equal(first, r:next_of(r:weigh({ prompt_tokens = 1 }, {})))
        end
        assert.equal(first, (r:choose({ prompt_tokens = 1 })))
    end)
end)
