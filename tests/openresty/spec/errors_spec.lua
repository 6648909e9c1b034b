local cjson = require("cjson")
local contract = require("contract")
local errors = require("mirror.errors")
local ngx = ngx

local function check_shape(document)
    assert.is_string(document.error.message)
    assert.is_string(document.error.type)
    assert.is_string(document.error.code)
    assert.equal(cjson.null, document.error.param)
    for key in pairs(document) do
        assert.equal("error", key)
    end
    for key in pairs(document.error) do
        assert.is_true(key == "message" or key == "type" or key == "code" or key == "param")
    end
end

describe("errors", function()
    for _, case in ipairs(contract.read("errors").edge) do
        it("has status " .. case.status .. " as the contract says", function()
            local body, retry_after_s = errors.body(case.status, "id-1")
            local document = cjson.decode(body)
            check_shape(document)
            assert.equal(case.type, document.error.type)
            assert.equal(case.code, document.error.code)
            assert.equal(case.retry_after, retry_after_s ~= nil)
            local shows_id = document.error.message:find("id-1", 1, true) ~= nil
            assert.equal(case.shows_request_id, shows_id)
        end)
    end

    it("gives an unknown status the shape of its hundred", function()
        assert.matches("bad_request", (errors.body(418)))
        assert.matches("internal_error", (errors.body(599)))
    end)

    it("makes one server-sent event of an interrupted stream", function()
        local event = errors.event("id-1")
        local data = event:match("^data: ([^\n]*)\n\n$")
        check_shape(cjson.decode(data))
        assert.equal(contract.read("errors").event.code, cjson.decode(data).error.code)
        assert.equal(contract.read("errors").event.type, cjson.decode(data).error.type)
    end)

    it("answers with the body's own length and closes", function()
        ngx.begin({ request_id = "id-1" })
        errors.send(408)
        assert.equal(408, ngx.status)
        assert.equal(#ngx.printed[1], ngx.header["Content-Length"])
        assert.equal("close", ngx.header["Connection"])
        assert.equal(200, ngx.exited)
        check_shape(cjson.decode(ngx.printed[1]))
    end)

    for _, case in ipairs(contract.read("errors").refusals) do
        it("refuses " .. case.name .. " as the contract says, connection kept", function()
            ngx.begin({ request_id = "id-1" })
            errors.refuse(case.name)
            local document = cjson.decode(ngx.printed[1])
            check_shape(document)
            assert.equal(case.status, ngx.status)
            assert.equal(case.type, document.error.type)
            assert.equal(case.code, document.error.code)
            assert.equal(case.retry_after, ngx.header["Retry-After"] ~= nil)
            assert.equal(case.status == 401 and "Bearer" or nil, ngx.header["WWW-Authenticate"])
            assert.is_nil(ngx.header["Connection"])
            assert.is_true(ngx.ctx.is_body_discarded)
        end)
    end

    it("refuses with the message and the time that it is given", function()
        ngx.begin({ request_id = "id-1" })
        ngx.ctx.is_body_read = true
        errors.refuse("rate_limited", { message = "Wait.", retry_after_s = 7, is_final = true })
        assert.equal("Wait.", cjson.decode(ngx.printed[1]).error.message)
        assert.equal(7, ngx.header["Retry-After"])
        assert.equal("false", ngx.header["x-should-retry"])
        assert.is_nil(ngx.ctx.is_body_discarded)
    end)

    it("tells a body that stopped half-way from a bad request", function()
        ngx.begin({ request_id = "id-1" })
        errors.send(400, true)
        assert.equal("incomplete_body", cjson.decode(ngx.printed[1]).error.code)
    end)

    it("replaces errors that are not JSON and nothing else", function()
        assert.is_true(errors.is_foreign(502, "text/html"))
        assert.is_true(errors.is_foreign(500, nil))
        assert.is_false(errors.is_foreign(429, "application/json"))
        assert.is_false(errors.is_foreign(400, "application/json; charset=utf-8"))
        assert.is_false(errors.is_foreign(200, "text/html"))
        assert.is_false(errors.is_foreign(304, nil))
    end)
end)
