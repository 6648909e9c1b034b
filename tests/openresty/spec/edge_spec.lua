local edge = require("mirror.edge")

local function settings(changes)
    local values = {
        gateways = "unix:/a.sock, unix:/b.sock",
        classes = "cpu,gpu",
        body_timeout_s = 30,
    }
    for key, value in pairs(changes or {}) do
        values[key] = value
    end
    return values
end

describe("edge", function()
    it("builds the router and the balancer from its settings", function()
        edge.configure(settings())
        assert.same({ "unix:/a.sock", "unix:/b.sock" }, edge.balancer.peers)
        assert.same({ "cpu", "gpu" }, edge.router.classes)
        assert.equal(30, edge.body_timeout_s)
    end)

    it("refuses a class that does not exist", function()
        assert.has_error(function()
            edge.configure(settings({ classes = "cpu,abacus" }))
        end, "classes: there is no device class abacus")
    end)

    it("refuses to be without gateways or classes", function()
        assert.has_error(function()
            edge.configure(settings({ gateways = "" }))
        end, "gateways: at least one gateway is needed")
        assert.has_error(function()
            edge.configure(settings({ classes = "" }))
        end, "classes: at least one device class is needed")
    end)
end)

describe("global variables", function()
    it("cannot be written by a module", function()
        assert.has_error(function()
            _G.leak = 1
        end)
        assert.has_error(setfenv(function()
            leak = 1 -- luacheck: ignore
        end, _G))
    end)
end)
