--- A Lua table constructor read as data: no code of the file is run, and each key has its line.

local find, sub, match = string.find, string.sub, string.match

local _M = {}

local DEPTH = 16
local WORDS = { ["true"] = true, ["false"] = false }

-- The line of the position. Reading only goes on, so each byte is looked at once.
local function line_here(self)
    while self.line_end < self.position do
        self.line = self.line + 1
        self.line_end = find(self.text, "\n", self.line_end + 1, true) or math.huge
    end
    return self.line
end

local function fail(self, message)
    error({ message = "line " .. line_here(self) .. ": " .. message }, 0)
end

-- Skips white space and comments; the rest of the text begins with what is next.
local function skip(self)
    while true do
        self.position = find(self.text, "[^%s]", self.position) or #self.text + 1
        if sub(self.text, self.position, self.position + 1) ~= "--" then
            return
        end
        local level = match(self.text, "^%-%-%[(=*)%[", self.position)
        local stop
        if level then
            stop = select(2, find(self.text, "]" .. level .. "]", self.position, true))
        else
            stop = find(self.text, "\n", self.position, true) or #self.text
        end
        if not stop then
            fail(self, "the comment has no end")
        end
        self.position = stop + 1
    end
end

-- What `pattern` (with one capture, or none) finds next, which is then passed; else nil.
local function take(self, pattern)
    skip(self)
    local first, last, captured = find(self.text, "^" .. pattern, self.position)
    if first then
        self.position = last + 1
        return captured or sub(self.text, first, last)
    end
end

local function expect(self, pattern, what)
    local found = take(self, pattern)
    if not found then
        local seen = match(self.text, "^[%w_.%-]+", self.position)
            or sub(self.text, self.position, self.position)
        fail(self, "expected " .. what .. ", found " .. (seen == "" and "the end" or seen))
    end
    return found
end

local function string_value(self)
    local quote = take(self, "[\"']")
    if not quote then
        return nil
    end
    local value = match(self.text, "^[^\n\\" .. quote .. "]*", self.position)
    self.position = self.position + #value
    if sub(self.text, self.position, self.position) ~= quote then
        fail(self, "the string has no end on its line, or a backslash")
    end
    self.position = self.position + 1
    return value
end

local function scalar(self)
    local value = string_value(self)
    if value ~= nil then
        return value
    end
    local digits = take(self, "(%-?%.?%d[%w.]*[%+%-]?%d*)")
    if digits then
        value = tonumber(digits)
        if not value then
            fail(self, digits .. " is not a number")
        end
        return value
    end
    local word = expect(self, "([%a_][%w_]*)", "a value")
    if WORDS[word] == nil then
        fail(self, word .. " is not a value: write a number, a string or a table")
    end
    return WORDS[word]
end

local table_value

local function value_at(self, path, depth)
    skip(self)
    self.lines[path] = line_here(self)
    if take(self, "{") then
        return table_value(self, path, depth + 1)
    end
    return scalar(self)
end

-- The name of a field, and its path; nil for an item of a list.
local function name_of(self, path)
    local name = take(self, "([%a_][%w_]*)%s*=%f[^=]")
    if not name and take(self, "%[") then
        name = string_value(self) or tonumber(expect(self, "(%d+)", "a name or a number"))
        expect(self, "%]", "]")
        expect(self, "=", "=")
    end
    if type(name) == "number" then
        return name, path .. "[" .. name .. "]"
    end
    return name, name and (path == "" and name or path .. "." .. name)
end

function table_value(self, path, depth)
    if depth > DEPTH then
        fail(self, "tables lie too deep in each other")
    end
    local result, items = {}, 0
    while not take(self, "}") do
        local name, field = name_of(self, path)
        if not name then
            items = items + 1
            name, field = items, path .. "[" .. items .. "]"
        end
        if result[name] ~= nil then
            fail(self, field .. " is given twice")
        end
        result[name] = value_at(self, field, depth)
        if not take(self, "[,;]") then
            expect(self, "}", "a comma or }")
            break
        end
    end
    return result
end

local function parse(self)
    take(self, "return%f[^%w_]")
    expect(self, "{", "return {")
    self.lines[""] = line_here(self)
    local result = table_value(self, "", 1)
    take(self, ";")
    skip(self)
    if self.position <= #self.text then
        fail(self, "nothing may follow the table")
    end
    return result
end

--- The table and its lines: `lines["a.b[2].c"]` is the line of that value. Or nil and a sentence
-- with the line at fault.
function _M.parse(text)
    -- Editors on Windows begin a file with a byte order mark.
    local start = sub(text, 1, 3) == "\239\187\191" and 4 or 1
    local self = { text = text, position = start, line = 0, line_end = 0, lines = {} }
    local is_parsed, result = pcall(parse, self)
    if is_parsed then
        return result, self.lines
    end
    return nil, type(result) == "table" and result.message or tostring(result)
end

return _M
