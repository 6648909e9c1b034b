local body = require("mirror.body")
local ngx = ngx

-- A request whose body comes from `receive(count)`.
local function request(var, receive, data)
    ngx.begin(var)
    local appended = {}
    ngx.req.socket = function()
        return {
            settimeout = function(_, timeout_ms)
                ngx.timeout_ms = timeout_ms
            end,
            receive = function(_, count)
                return receive(count)
            end,
        }
    end
    ngx.req.init_body = function() end
    ngx.req.append_body = function(chunk)
        appended[#appended + 1] = #chunk
    end
    ngx.req.finish_body = function()
        appended.is_finished = true
    end
    ngx.req.read_body = function() end
    ngx.req.get_body_file = function() end
    ngx.req.get_body_data = function()
        return data
    end
    return appended
end

describe("request body", function()
    it("is kept whole for the proxy and sampled from its beginning", function()
        local appended = request({ http_content_length = "150000" }, function(count)
            return ("x"):rep(count)
        end)
        local sample, length = body.read(3)
        assert.equal(65536, #sample)
        assert.equal(150000, length)
        assert.same({ 65536, 65536, 18928, is_finished = true }, appended)
        assert.equal(3000, ngx.timeout_ms)
    end)

    it("is refused with 408 when it stops arriving", function()
        request({ http_content_length = "10" }, function()
            return nil, "timeout", "abc"
        end)
        assert.same({ nil, 408 }, { body.read(1) })
    end)

    it("is refused with 400 when the client stops half-way", function()
        request({ http_content_length = "10" }, function()
            return nil, "closed", "abc"
        end)
        assert.same({ nil, 400 }, { body.read(1) })
    end)

    it("is read by nginx where it comes in chunks", function()
        request({ http_transfer_encoding = "chunked" }, error, "abc")
        assert.same({ "abc", 3 }, { body.read(1) })
    end)

    it("is empty where there is none", function()
        request({}, error, nil)
        assert.same({ "", 0 }, { body.read(1) })
        request({ http_content_length = "0" }, error, nil)
        assert.same({ "", 0 }, { body.read(1) })
    end)

    it("is sampled from the file that nginx had to write", function()
        request({ http_transfer_encoding = "chunked" }, error, nil)
        local path = os.tmpname()
        local file = assert(io.open(path, "wb"))
        file:write(("y"):rep(70000))
        file:close()
        ngx.req.get_body_file = function()
            return path
        end
        local sample, length = body.read(1)
        os.remove(path)
        assert.equal(65536, #sample)
        assert.equal(70000, length)
    end)

    it("is an error of the server where that file is gone", function()
        request({ http_transfer_encoding = "chunked" }, error, nil)
        ngx.req.get_body_file = function()
            return "/nonexistent/body"
        end
        assert.same({ nil, 500 }, { body.read(1) })
    end)
end)
