//! Parses the values of QEMU's options: keys and values between commas, or a JSON object.

use serde_json::Value;

/// The maximum number of words of a command line that are read.
pub(super) const WORDS_MAX: usize = 4096;

/// Keys and values of one option.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Words {
    pairs: Vec<(String, String)>,
}

impl Words {
    /// Parses a value whose first word may omit its key.
    pub(super) fn read(text: &str, first: &str) -> Self {
        if text.starts_with('{')
            && let Ok(value) = serde_json::from_str(text)
        {
            let mut words = Self::default();
            words.flatten("", &value);
            return words;
        }
        let mut pairs = Vec::new();
        for (number, part) in parts(text).into_iter().enumerate() {
            let pair = match part.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if number == 0 && !first.is_empty() => (first.to_owned(), part),
                None => match part.strip_prefix("no") {
                    // QEMU's old short form: `nowait` means `wait=off`.
                    Some(key @ ("wait" | "delay")) => (key.to_owned(), "off".to_owned()),
                    _ => (part, "on".to_owned()),
                },
            };
            let is_nothing = pair.0.is_empty() || text.is_empty();
            if !is_nothing {
                pairs.push(pair);
            }
        }
        Self { pairs }
    }

    fn flatten(&mut self, prefix: &str, value: &Value) {
        let text = match value {
            Value::Object(map) => {
                for (key, value) in map {
                    let key = match prefix {
                        "" => key.clone(),
                        prefix => format!("{prefix}.{key}"),
                    };
                    self.flatten(&key, value);
                }
                return;
            }
            Value::Array(list) => {
                for (number, value) in list.iter().enumerate() {
                    self.flatten(&format!("{prefix}.{number}"), value);
                }
                return;
            }
            Value::Bool(true) => "on".to_owned(),
            Value::Bool(false) => "off".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        self.pairs.push((prefix.to_owned(), text));
    }

    /// Returns the value of a key; the last where there are several.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let mut pairs = self.pairs.iter().rev();
        pairs
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// Removes a key and returns its value.
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        let value = self.get(key).map(str::to_owned);
        self.pairs.retain(|(name, _)| name != key);
        value
    }

    /// Inserts a pair.
    pub(super) fn put(&mut self, key: &str, value: &str) {
        self.pairs.push((key.to_owned(), value.to_owned()));
    }

    /// Returns all pairs.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Returns the key of an inherited file descriptor, if there is one.
    pub(super) fn descriptor(&self) -> Option<&str> {
        let descriptor = |(key, value): &(&str, &str)| {
            let last = key.rsplit('.').next().unwrap_or(key);
            matches!(last, "fd" | "fds" | "vhostfd" | "vhostfds" | "fdset")
                || value.contains("/dev/fdset/")
        };
        self.iter().find(descriptor).map(|(key, _)| key)
    }
}

/// Splits at commas; a doubled comma is a literal one.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let escaped = c == ',' && chars.peek() == Some(&',');
        if c == ',' && !escaped {
            parts.push(String::new());
            continue;
        }
        if escaped {
            chars.next();
        }
        if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(String, String)> {
        Words::read(text, "driver").pairs
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn both_forms_are_read() {
        assert_eq!(
            read("virtio-blk-pci,drive=d0,share-rw"),
            pairs(&[
                ("driver", "virtio-blk-pci"),
                ("drive", "d0"),
                ("share-rw", "on")
            ])
        );
        assert_eq!(
            read("file=/a,,b,c.raw,server,nowait"),
            pairs(&[
                ("file", "/a,b"),
                ("c.raw", "on"),
                ("server", "on"),
                ("wait", "off")
            ])
        );
        assert_eq!(
            read(r#"{"driver":"raw","file":{"driver":"file","filename":"/a"},"read-only":true}"#),
            pairs(&[
                ("driver", "raw"),
                ("file.driver", "file"),
                ("file.filename", "/a"),
                ("read-only", "on")
            ])
        );
        assert_eq!(read(""), []);
        assert_eq!(read(",,"), pairs(&[("driver", ",")]));
    }

    #[test]
    fn descriptors_are_seen() {
        assert_eq!(
            Words::read("tap,fd=3,id=a", "type").descriptor(),
            Some("fd")
        );
        assert_eq!(
            Words::read("socket,addr.fd=3", "").descriptor(),
            Some("addr.fd")
        );
        assert_eq!(
            Words::read("file=/dev/fdset/1", "").descriptor(),
            Some("file")
        );
        assert_eq!(Words::read("file=/srv/fd=3", "").descriptor(), None);
    }
}
