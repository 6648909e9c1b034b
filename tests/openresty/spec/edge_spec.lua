local edge = require("mirror.edge")

local function settings(changes)
    local values = {
        gateways = "unix:/a.sock, unix:/b.sock",
        classes = "cpu,gpu",
        models = "m",
        body_timeout_s = 30,
        policy_file = "openresty/lua/mirror/policy.lua",
        keys_file = "/nonexistent/keys.json",
        admin_token_file = "/nonexistent/admin-token",
        may_be_open = true,
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
        assert.same({ "cpu", "gpu" }, edge.router().classes)
        assert.equal(30, edge.body_timeout_s)
    end)

    it("refuses a class that does not exist", function()
        assert.has_error(function()
            edge.configure(settings({ classes = "cpu,abacus" }))
        end, "classes: there is no device class abacus")
    end)

    it("refuses a policy that cannot be read, or that is bad, with the line at fault", function()
        assert.has_error(function()
            edge.configure(settings({ policy_file = "/nonexistent/policy.lua" }))
        end, "policy: the file cannot be read: /nonexistent/policy.lua: No such file or directory")
        assert.has_error(function()
            edge.configure(settings({ policy_file = "openresty/.luacheckrc" }))
        end, "policy: line 1: expected return {, found std")
    end)

    it("takes a policy that was put at once", function()
        edge.configure(settings())
        local policy = edge.policies:get()
        policy.caps = { cpu = 3 }
        edge.policies:put(policy)
        assert.same({ cpu = 3 }, edge.router().policy.caps)
        assert.equal(edge.router(), edge.router())
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
