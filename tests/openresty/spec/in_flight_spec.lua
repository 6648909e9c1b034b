local fake_ngx = require("fake_ngx")
local in_flight = require("mirror.in_flight")
local ngx = ngx

describe("requests in flight", function()
    local dict, flight

    local function of(pid)
        return in_flight.new(dict, function()
            return pid
        end)
    end

    before_each(function()
        dict = fake_ngx.dict(ngx.now)
        flight = of(41)
    end)

    it("are counted over all workers", function()
        assert.equal(0, flight:count("class|cpu"))
        assert.equal(1, flight:add("class|cpu", 1))
        assert.equal(2, of(42):add("class|cpu", 1))
        assert.equal(2, flight:count("class|cpu"))
        assert.equal(1, flight:add("class|cpu", -1))
    end)

    it("are given back once where their worker is dead", function()
        local dead = of(7)
        dead:add("unix:/a.sock", 1)
        dead:add("unix:/a.sock", 1)
        dead:add("tenant|a-b_c.d", 1)
        flight:add("unix:/a.sock", 1)
        local function is_alive(pid)
            return pid ~= 7
        end
        flight:recover(is_alive)
        of(42):recover(is_alive)
        assert.equal(1, flight:count("unix:/a.sock"))
        assert.equal(0, flight:count("tenant|a-b_c.d"))
    end)

    it("do not fall below 0 where a full dict has lost a count", function()
        flight:add("tenant|a", 1)
        flight:add("tenant|a", 1)
        dict:delete("flight|tenant|a")
        dict:delete("held|41|tenant|a")
        assert.equal(0, flight:add("tenant|a", -1))
        assert.equal(0, flight:add("tenant|a", -1))
        assert.equal(1, flight:add("tenant|a", 1))
        flight:recover(function()
            return false
        end)
        assert.equal(1, flight:count("tenant|a"))
    end)

    it("are left alone where their worker drains", function()
        local draining = of(8)
        draining:add("class|gpu", 1)
        flight:recover(function()
            return true
        end)
        assert.equal(1, flight:count("class|gpu"))
        draining:add("class|gpu", -1)
        assert.equal(0, flight:count("class|gpu"))
    end)
end)
