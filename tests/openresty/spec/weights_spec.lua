local cjson = require("cjson")
local fake_ngx = require("fake_ngx")
local weights = require("mirror.weights")
local ngx = ngx

describe("weight document", function()
    local dict, store

    local function sent(changes)
        local document = {
            version = 1,
            at = ngx.now(),
            classes = {
                cpu = { factor = 1, utilisation = 0.5, temperature_c = cjson.null, slots = 8 },
                gpu = {
                    factor = 0.25, health = 0.5, temperature_c = 86, memory_pressure = 0.3,
                    in_flight = 3,
                },
            },
            degrade_level = 1,
        }
        for key, value in pairs(changes or {}) do
            document[key] = value
        end
        return cjson.encode(document)
    end

    before_each(function()
        ngx.advance(100)
        dict = fake_ngx.dict(ngx.now)
        store = weights.new(dict, ngx.now)
    end)

    it("gives factors, places and the level to all workers", function()
        assert.is_true(store:put(sent()))
        local live = weights.new(dict, ngx.now):live()
        assert.same({ cpu = 1, gpu = 0.25 }, live.factors)
        assert.same({ cpu = 8 }, live.slots)
        assert.same({ cpu = 1, gpu = 0.5 }, live.health)
        assert.equal(1, live.degrade_level)
        assert.equal(1, live.draft_factor)
        assert.is_false(live.is_stale)
    end)

    it("gives the measured shares, as long as it is fresh", function()
        local short = { below = 50, shares = { cpu = 0.4, gpu = 0.6 } }
        local splits = { short, { shares = { gpu = 1 } } }
        assert.is_true(store:put(sent({ splits = splits })))
        assert.same(splits, store:live().splits)
        ngx.advance(5.1)
        assert.is_nil(store:live().splits)
        assert.is_true(store:put(sent()))
        assert.is_nil(store:live().splits)
    end)

    it("counts for nothing where there is none, or it is over 5 s old", function()
        assert.is_true(store:live().is_stale)
        assert.is_nil(store:age_s())
        store:put(sent({ degrade_level = 3, draft_factor = 0 }))
        ngx.advance(4.9)
        assert.is_false(store:live().is_stale)
        assert.equal(0, store:live().draft_factor)
        ngx.advance(0.2)
        local live = store:live()
        assert.is_true(live.is_stale)
        assert.same({}, live.factors)
        assert.same({}, live.slots)
        assert.equal(0, live.degrade_level)
        assert.equal(1, live.draft_factor)
        assert.is_true(store:put(sent()))
        assert.is_false(store:live().is_stale)
    end)

    it("does not live longer for being dated ahead", function()
        store:put(sent({ at = ngx.now() + 4 }))
        ngx.advance(5.1)
        assert.is_true(store:live().is_stale)
    end)

    local refused = {
        { "not JSON", "{" },
        { "it is null", "null" },
        { "version is nil", function() return '{"at": 1, "classes": {}}' end },
        { "at is nil", function() return '{"version": 1, "classes": {}}' end },
        { "it lies in the future", function() return sent({ at = ngx.now() + 6 }) end },
        { "it is too old", function() return sent({ at = ngx.now() - 6 }) end },
        { "older than the document", function() return sent({ at = ngx.now() - 1 }) end },
        { "at is %-?inf", function() return (sent({ at = 0 }):gsub('"at":0', '"at":1e999')) end },
        { "degrade_level is 4", function() return sent({ degrade_level = 4 }) end },
        { "degrade_level is 1.5", function() return sent({ degrade_level = 1.5 }) end },
        { "draft_factor is 1.5; it must be", function() return sent({ draft_factor = 1.5 }) end },
        { "draft_factor is null", function() return sent({ draft_factor = cjson.null }) end },
        { "classes is null", function() return sent({ classes = cjson.null }) end },
        {
            "classes.abacus is",
            function() return sent({ classes = { abacus = { factor = 1 } } }) end,
        },
        { "cpu is 1; it must be", function() return sent({ classes = { cpu = 1 } }) end },
        { "cpu.factor is nil", function() return sent({ classes = { cpu = {} } }) end },
        {
            "factor is 1.01",
            function() return sent({ classes = { cpu = { factor = 1.01 } } }) end,
        },
        {
            "factor is %-0.1",
            function() return sent({ classes = { cpu = { factor = -0.1 } } }) end,
        },
        { 'factor is "1";', function() return sent({ classes = { cpu = { factor = "1" } } }) end },
        {
            "factor is %-?nan",
            function()
                local text = sent({ classes = { cpu = { factor = 7 } } })
                return (text:gsub('"factor":7', '"factor":NaN'))
            end,
        },
        {
            "health is 2",
            function() return sent({ classes = { cpu = { factor = 1, health = 2 } } }) end,
        },
        {
            "slots is %-1",
            function() return sent({ classes = { cpu = { factor = 1, slots = -1 } } }) end,
        },
        { "splits", function() return sent({ splits = "all" }) end },
        { "splits", function() return sent({ splits = {} }) end },
        {
            "splits%[1%].shares.cpu is %-1",
            function() return sent({ splits = { { shares = { cpu = -1 } } } }) end,
        },
        {
            "splits%[1%].shares",
            function() return sent({ splits = { { shares = { cpu = 0 } } } }) end,
        },
        {
            "splits%[1%].below",
            function() return sent({ splits = { { below = 9, shares = { cpu = 1 } } } }) end,
        },
        {
            "splits%[2%].below",
            function()
                local step = { below = 9, shares = { cpu = 1 } }
                return sent({ splits = { step, step, { shares = { cpu = 1 } } } })
            end,
        },
        {
            'temperature_c is "hot"',
            function()
                return sent({ classes = { cpu = { factor = 1, temperature_c = "hot" } } })
            end,
        },
    }
    for _, case in ipairs(refused) do
        it("is refused where " .. case[1] .. ", and the old one stays", function()
            assert.is_true(store:put(sent()))
            local text = type(case[2]) == "function" and case[2]() or case[2]
            local is_put, sentence = store:put(text)
            assert.is_nil(is_put)
            assert.matches(case[1], sentence)
            assert.same({ cpu = 1, gpu = 0.25 }, store:live().factors)
        end)
    end

    it("is taken again after the clock was set back", function()
        store:put(sent())
        ngx.advance(-3600)
        assert.is_true(store:put(sent({ degrade_level = 2 })))
        assert.equal(2, store:live().degrade_level)
        ngx.advance(3600)
    end)
end)
