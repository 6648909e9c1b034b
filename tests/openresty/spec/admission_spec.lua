local admission = require("mirror.admission")
local fake_ngx = require("fake_ngx")
local in_flight = require("mirror.in_flight")
local ngx = ngx

describe("admission", function()
    local dict, flight, door

    local function new()
        return admission.new(dict, flight, ngx.now)
    end

    before_each(function()
        ngx.advance(60 - ngx.now() % 60)
        dict = fake_ngx.dict(ngx.now)
        flight = in_flight.new(fake_ngx.dict(ngx.now), ngx.worker.pid)
        door = new()
    end)

    it("admits everything where the key has no limits", function()
        local caller = { tenant = "a" }
        for _ = 1, 1000 do
            assert.is_true(door:enter(caller))
            assert.is_table(door:charge(caller, 1e6))
        end
        assert.is_nil(door:headers(caller))
        assert.equal(1000, flight:count("tenant|a"))
    end)

    it("holds a key to its requests at once", function()
        local caller = { tenant = "a", concurrency = 2 }
        assert.is_true(door:enter(caller))
        assert.is_true(new():enter(caller))
        local is_admitted, refusal = door:enter(caller)
        assert.is_nil(is_admitted)
        assert.equal("concurrency", refusal.reason)
        assert.equal(1, refusal.retry_after_s)
        assert.matches("2 requests at once", refusal.message)
        door:leave(caller)
        assert.is_true(door:enter(caller))
        assert.equal(2, flight:count("tenant|a"))
    end)

    it("holds a key to its requests a minute and says when to come back", function()
        local caller = { tenant = "a", requests_per_minute = 3 }
        for _ = 1, 3 do
            assert.is_true(door:enter(caller))
            door:leave(caller)
        end
        for _ = 1, 5 do
            local is_admitted, refusal = door:enter(caller)
            assert.is_nil(is_admitted)
            assert.equal("requests", refusal.reason)
            assert.equal(61, refusal.retry_after_s)
        end
        assert.equal(0, flight:count("tenant|a"))
        ngx.advance(60.6)
        assert.is_nil((door:enter(caller)))
        ngx.advance(0.1)
        assert.is_true(door:enter(caller))
        assert.is_nil((door:enter(caller)))
    end)

    it("admits the limit over time, and hardly more in any minute", function()
        local caller = { tenant = "a", requests_per_minute = 60 }
        local times = {}
        for _ = 1, 6000 do
            ngx.advance(0.1)
            if door:enter(caller) then
                times[#times + 1] = ngx.now()
            end
        end
        assert.is_true(#times >= 560 and #times <= 660, #times)
        for index = 1, #times - 60 do
            assert.is_true(times[index + 60] - times[index] > 57)
        end
    end)

    it("lets go a minute after a burst, whenever in the minute that was", function()
        local caller = { tenant = "a", requests_per_minute = 5 }
        for _ = 1, 8 do
            ngx.advance(70 + 1.3)
            while door:enter(caller) do
                door:leave(caller)
            end
            local _, refusal = door:enter(caller)
            local waited = 0
            while not door:enter(caller) do
                ngx.advance(0.1)
                waited = waited + 0.1
            end
            door:leave(caller)
            assert.is_true(waited > 58 and waited < 62.1, waited)
            assert.is_true(math.abs(refusal.retry_after_s - waited) <= 1.1, refusal.retry_after_s)
        end
    end)

    it("counts by tenant: a second key buys nothing", function()
        local first, second = { tenant = "a", requests_per_minute = 2 },
            { tenant = "a", requests_per_minute = 2 }
        assert.is_true(door:enter(first))
        assert.is_true(door:enter(second))
        assert.is_nil((door:enter(first)))
        assert.is_true(door:enter({ tenant = "b", requests_per_minute = 2 }))
    end)

    it("holds a key to its tokens a minute", function()
        local caller = { tenant = "a", tokens_per_minute = 100 }
        assert.is_table(door:charge(caller, 60))
        local charge, refusal = door:charge(caller, 50)
        assert.is_nil(charge)
        assert.equal("tokens", refusal.reason)
        assert.is_false(refusal.is_final)
        assert.is_true(refusal.retry_after_s >= 1)
        assert.is_table(door:charge(caller, 40))
        charge, refusal = door:charge(caller, 101)
        assert.is_nil(charge)
        assert.is_true(refusal.is_final)
    end)

    it("corrects tokens by what was really used", function()
        local caller = { tenant = "a", tokens_per_minute = 1000 }
        local function remaining()
            return door:headers(caller)["x-ratelimit-remaining-tokens"]
        end
        door:settle(caller, door:charge(caller, 100), 400)
        assert.equal("600", remaining())
        door:settle(caller, door:charge(caller, 500), 150)
        assert.equal("450", remaining())
        local late = door:charge(caller, 450)
        ngx.advance(59)
        door:settle(caller, late, 50)
        assert.equal("400", remaining())
        ngx.advance(120)
        assert.equal("1000", remaining())
    end)

    it("tells the limits as OpenAI does", function()
        local caller = { tenant = "a", requests_per_minute = 10, tokens_per_minute = 5000 }
        door:enter(caller)
        door:charge(caller, 120)
        assert.same({
            ["x-ratelimit-limit-requests"] = "10",
            ["x-ratelimit-remaining-requests"] = "9",
            ["x-ratelimit-reset-requests"] = "1m2s",
            ["x-ratelimit-limit-tokens"] = "5000",
            ["x-ratelimit-remaining-tokens"] = "4880",
            ["x-ratelimit-reset-tokens"] = "1m2s",
        }, door:headers(caller))
        ngx.advance(61.5)
        assert.equal("500ms", door:headers(caller)["x-ratelimit-reset-tokens"])
        assert.is_nil(door:headers({ tenant = "b", requests_per_minute = 1 })
            ["x-ratelimit-limit-tokens"])
    end)
end)
