local methods = require("mirror.methods")

describe("methods", function()
    it("lets generation paths take POST only", function()
        for _, path in ipairs({ "/v1/chat/completions", "/v1/completions" }) do
            assert.is_true(methods.is_allowed(path, "POST"))
            assert.is_true(methods.is_allowed(path, "OPTIONS"))
            for _, method in ipairs({ "GET", "HEAD", "PUT", "DELETE", "PATCH", "allow", "" }) do
                assert.is_false(methods.is_allowed(path, method))
            end
            assert.equal("POST, OPTIONS", methods.allow(path))
        end
    end)

    it("lets reading paths take GET and HEAD", function()
        for _, path in ipairs({ "/", "/v1/models", "/v1/models/a/b", "/health", "/metrics" }) do
            assert.is_true(methods.is_allowed(path, "GET"))
            assert.is_true(methods.is_allowed(path, "HEAD"))
            assert.is_false(methods.is_allowed(path, "POST"))
            assert.equal("GET, HEAD, OPTIONS", methods.allow(path))
        end
    end)

    it("allows nothing on other paths", function()
        for _, path in ipairs({ "/v1", "/v1/modelsx", "/admin/state", "" }) do
            assert.is_false(methods.is_allowed(path, "GET"))
            assert.is_nil(methods.allow(path))
        end
    end)
end)
