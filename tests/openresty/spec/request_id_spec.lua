local contract = require("contract")
local request_id = require("mirror.request_id")
local ngx = ngx

describe("request id", function()
    local ids = contract.read("edge_headers").request_ids

    for _, id in ipairs(ids.kept) do
        it("keeps " .. id, function()
            ngx.begin({ http_x_request_id = id, request_id = "made" })
            assert.equal(id, request_id.get())
        end)
    end

    for _, id in ipairs(ids.replaced) do
        it(string.format("replaces %q", id), function()
            ngx.begin({ http_x_request_id = id, request_id = "made" })
            assert.equal("made", request_id.get())
        end)
    end

    it("makes one where the client sent none", function()
        ngx.begin({ request_id = "made" })
        assert.equal("made", request_id.get())
    end)

    it("allows 128 characters and no more", function()
        assert.is_true(request_id.is_sane(("x"):rep(128)))
        assert.is_false(request_id.is_sane(("x"):rep(129)))
    end)

    it("stays the same within a request", function()
        ngx.begin({ request_id = "first" })
        request_id.get()
        ngx.var.request_id = "second"
        assert.equal("first", request_id.get())
    end)
end)
