local fake_ngx = require("fake_ngx")
local qps = require("mirror.qps")
local sliding_window = require("mirror.sliding_window")
local ngx = ngx

-- The clock at the beginning of a fixed window of a minute.
local function at_a_full_minute()
    ngx.advance(60 - ngx.now() % 60)
end

describe("sliding window", function()
    local dict, window

    before_each(function()
        at_a_full_minute()
        dict = fake_ngx.dict(ngx.now)
        window = sliding_window.new(dict, "w", 60, 6, ngx.now)
    end)

    it("adds up what came, whichever worker counted it", function()
        local other = sliding_window.new(dict, "w", 60, 6, ngx.now)
        assert.equal(2, (window:add("a", 2)))
        assert.equal(5, (other:add("a", 3)))
        assert.equal(5, window:sum("a"))
        assert.equal(0, window:sum("b"))
    end)

    it("forgets a part evenly once it is a window old", function()
        window:add("a", 30)
        ngx.advance(60)
        assert.equal(30, window:sum("a"))
        ngx.advance(10 / 3)
        assert.is_true(math.abs(window:sum("a") - 20) < 1e-6)
        ngx.advance(10 * 2 / 3)
        assert.equal(0, window:sum("a"))
    end)

    it("takes back from the window that was added to", function()
        local _, index = window:add("a", 10)
        ngx.advance(50)
        window:add("a", 5)
        window:take_back("a", 4, index)
        assert.equal(11, window:sum("a"))
        ngx.advance(600)
        window:take_back("a", 4, index)
        assert.equal(0, window:sum("a"))
    end)

    for _, case in ipairs({
        { 10, 0, 5 }, { 10, 45, 5 }, { 10, 45, 0 }, { 10, 66, 1 }, { 10, 5, 9 }, { 10, 59, 10 },
    }) do
        local added, later_s, level = unpack(case)
        it("knows when " .. added .. " have come down to " .. level .. " after "
            .. later_s .. " s", function()
            window:add("a", added)
            ngx.advance(later_s)
            local wait_s = window:seconds_until("a", level)
            if wait_s > 0.01 then
                ngx.advance(wait_s - 0.01)
                assert.is_true(window:sum("a") > level)
                ngx.advance(0.01)
            end
            assert.is_true(window:sum("a") <= level + 1e-6)
        end)
    end

    it("leaves nothing behind in the dict", function()
        for index = 1, 50 do
            window:add("key " .. index, 1)
        end
        ngx.advance(121)
        for _, key in ipairs(dict:get_keys()) do
            assert.is_nil(dict:get(key))
        end
    end)
end)

describe("requests a second", function()
    it("follow the rate of all, of a class and of a tenant", function()
        local meter = qps.new(fake_ngx.dict(ngx.now), ngx.now)
        local rate
        for index = 1, 400 do
            rate = meter:arrive(index % 4 == 0 and "acme" or "shop")
            meter:route(index % 2 == 0 and "cpu" or "gpu")
            ngx.advance(1 / 20)
        end
        for expected, measured in pairs({
            [20] = rate, [5] = meter:of_tenant("acme"), [15] = meter:of_tenant("shop"),
            [10] = meter:of_class("cpu"),
        }) do
            assert.is_true(math.abs(measured - expected) <= 0.05 * expected + 0.4, measured)
        end
        assert.equal(0, meter:of_tenant("nobody"))
        ngx.advance(20)
        assert.equal(0, meter:all())
    end)
end)
