//! Reads and writes flat JSON objects, a line each: the protocol between the arena and the
//! laboratory.

use std::fmt::Write as _;

/// A value of a flat object; numbers are kept in their written form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Text(String),
    Number(String),
    Bool(bool),
    Null,
}

/// An object without nesting, in the order of its members.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Object(Vec<(String, Value)>);

impl Object {
    /// Parses one line; `None` where it is not a flat JSON object.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut reader = Reader { rest: line.trim() };
        let object = reader.object()?;
        reader.rest.is_empty().then_some(object)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        match self.get(key)? {
            Value::Number(number) => number.parse().ok(),
            _ => None,
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.0
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value)
    }
}

/// Writes one line of JSON, member by member.
#[derive(Debug)]
pub(crate) struct Line(String);

impl Line {
    pub(crate) fn new() -> Self {
        Self(String::from("{"))
    }

    pub(crate) fn number(mut self, key: &str, value: u64) -> Self {
        self.key(key);
        // Writing to a String cannot fail.
        let _ = write!(self.0, "{value}");
        self
    }

    pub(crate) fn text(mut self, key: &str, value: &str) -> Self {
        self.key(key);
        quote(&mut self.0, value);
        self
    }

    pub(crate) fn finish(mut self) -> String {
        self.0.push_str("}\n");
        self.0
    }

    fn key(&mut self, key: &str) {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        quote(&mut self.0, key);
        self.0.push(':');
    }
}

fn quote(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            character if character.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(character));
            }
            character => out.push(character),
        }
    }
    out.push('"');
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn object(&mut self) -> Option<Object> {
        let mut members = Vec::new();
        self.token('{')?;
        if self.token('}').is_some() {
            return Some(Object(members));
        }
        loop {
            let key = self.string()?;
            self.token(':')?;
            members.push((key, self.value()?));
            if self.token(',').is_none() {
                self.token('}')?;
                return Some(Object(members));
            }
        }
    }

    fn value(&mut self) -> Option<Value> {
        self.rest = self.rest.trim_start();
        if self.rest.starts_with('"') {
            return self.string().map(Value::Text);
        }
        let end = self
            .rest
            .find(|character: char| {
                character == ',' || character == '}' || character.is_whitespace()
            })
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        let value = match word {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            "null" => Value::Null,
            number => {
                number.parse::<f64>().ok()?;
                Value::Number(number.to_owned())
            }
        };
        self.rest = rest;
        Some(value)
    }

    fn string(&mut self) -> Option<String> {
        self.token('"')?;
        let mut text = String::new();
        let mut characters = self.rest.char_indices();
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    self.rest = self.rest.get(at + 1..)?;
                    return Some(text);
                }
                '\\' => match characters.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'u' => {
                        let digits: String = characters.by_ref().take(4).map(|(_, c)| c).collect();
                        text.push(char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?);
                    }
                    other => text.push(other),
                },
                character => text.push(character),
            }
        }
        None
    }

    fn token(&mut self, token: char) -> Option<()> {
        let rest = self.rest.trim_start();
        self.rest = rest.strip_prefix(token)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        let line = Line::new()
            .number("id", 7)
            .text("found", "a \"b\" \\ \u{7}")
            .finish();
        let object = Object::parse(&line).unwrap();
        assert_eq!(object.number("id"), Some(7));
        assert_eq!(object.text("found"), Some("a \"b\" \\ \u{7}"));
        assert_eq!(object.number("found"), None);
    }

    #[test]
    fn reads_spaces_and_every_kind_of_value() {
        let object = Object::parse(r#" { "a" : 1.5, "b":true ,"c": null, "d":"" } "#).unwrap();
        assert_eq!(object.get("a"), Some(&Value::Number("1.5".into())));
        assert_eq!(object.get("b"), Some(&Value::Bool(true)));
        assert_eq!(object.get("c"), Some(&Value::Null));
        assert_eq!(object.text("d"), Some(""));
        assert_eq!(Object::parse("{}"), Some(Object::default()));
    }

    #[test]
    fn refuses_what_is_not_a_flat_object() {
        for line in [
            "",
            "{",
            "[]",
            "{\"a\":}",
            "{\"a\":1",
            "{\"a\":1}x",
            "{\"a\":{}}",
            "{\"a",
            "{\"\\",
        ] {
            assert_eq!(Object::parse(line), None, "{line}");
        }
    }
}
