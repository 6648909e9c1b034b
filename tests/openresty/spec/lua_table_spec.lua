local lua_table = require("mirror.lua_table")

describe("Lua table as data", function()
    it("is read with all that a table of settings has", function()
        local text = [==[
-- A comment.
--[[ One of
several lines. ]]
return {
    a = 1, b = -2.5; ["c d"] = 'x', [3] = 1e3,
    list = { "p", "q", { deep = true, }, false },
    --[=[ ]] ]=] last = .5,
};
]==]
        local value, lines = lua_table.parse(text)
        assert.same({
            a = 1, b = -2.5, ["c d"] = "x", [3] = 1000, list = { "p", "q", { deep = true }, false },
            last = 0.5,
        }, value)
        assert.equal(5, lines.b)
        assert.equal(6, lines["list[3].deep"])
        assert.equal(7, lines.last)
    end)

    it("may lack the return and have odd line ends", function()
        assert.same({ a = 1 }, lua_table.parse("{\r\n\ta=1\r\n}"))
        assert.same({}, lua_table.parse("return{}"))
    end)

    it("may begin with the mark of an editor on Windows", function()
        local value, lines = lua_table.parse("\239\187\191return {\r\n a = 1 }\r\n")
        assert.same({ a = 1 }, value)
        assert.equal(2, lines.a)
    end)

    it("is read in time that grows with its length only", function()
        for _, item in ipairs({ "1,", "1,\n" }) do
            local text = "{" .. item:rep(100000) .. "}"
            local began = os.clock()
            assert.equal(100000, #lua_table.parse(text))
            assert.is_true(os.clock() - began < 5)
        end
    end)

    local faults = {
        { "", "line 1: expected return {, found the end" },
        { "return {\n a = os.exit() }", "line 2: os is not a value" },
        { "return { a = function() end }", "function is not a value" },
        { "return { a = nil }", "nil is not a value" },
        { "return { a = 1 + 1 }", "line 1: expected a comma or }, found" },
        { "return {\n\na = 1 b = 2 }", "line 3: expected a comma or }, found b" },
        { "return { a = 1,\n a = 2 }", "line 2: a is given twice" },
        { "return { a = 'x\n' }", "the string has no end" },
        { "return { a = '\\n' }", "or a backslash" },
        { "return { a = 1.2.3 }", "1.2.3 is not a number" },
        { "return { a = 12abc }", "12abc is not a number" },
        { "return { a == 1 }", "a is not a value" },
        { "return { } os.exit()", "nothing may follow" },
        { "return { --[[ }", "the comment has no end" },
        { "return {\n a = {\n", "line 3: expected a value, found the end" },
        { ("{"):rep(100), "too deep" },
        { "\27Lua", "line 1: expected return {" },
    }
    for _, fault in ipairs(faults) do
        it("refuses " .. ("%q"):format(fault[1]:sub(1, 40)), function()
            local value, sentence = lua_table.parse(fault[1])
            assert.is_nil(value)
            assert.is_truthy(sentence:find(fault[2], 1, true), sentence)
        end)
    end

    it("ends on any bytes, with a value or a sentence", function()
        math.randomseed(7)
        local pieces = { "{", "}", "a", "=", "1", "'", ",", "--", "[", "]", "\n", "\255" }
        for _ = 1, 3000 do
            local text = {}
            for index = 1, math.random(12) do
                text[index] = pieces[math.random(#pieces)]
            end
            local value, rest = lua_table.parse(table.concat(text))
            assert.is_true(type(value) == "table" or rest:find("^line %d+: ") ~= nil)
        end
    end)
end)
