//! Finds the end of the device state.
//!
//! The devices' sections carry no lengths, and with a return path QEMU leaves the socket open. At
//! the end QEMU writes a description of the sections: `00` (end mark), `06`, a length in four
//! bytes, and a JSON object of exactly that length. The finder accepts the first place in the bytes
//! where all of this holds, the object's nesting included. JSON has no bytes below 0x20 except
//! white space, so at most one candidate exists at a time, and every byte is read again at most
//! once.

use crate::format::mark;

/// Bytes before the description's JSON.
const HEAD: usize = 6;

/// Searches the end in a growing array of bytes.
#[derive(Debug, Default)]
pub(crate) struct EndFinder {
    from: usize,
    object: Option<Object>,
}

#[derive(Debug)]
struct Object {
    at: usize,
    end: usize,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl EndFinder {
    /// Returns the length of the device state at the head of `bytes`, once it is complete. Repeated
    /// calls get the same bytes and more.
    pub(crate) fn find(&mut self, bytes: &[u8]) -> Option<usize> {
        loop {
            if let Some(object) = &mut self.object {
                match object.scan(bytes) {
                    Scan::Ended => return Some(object.end),
                    Scan::Unfinished => return None,
                    Scan::Invalid => {
                        self.object = None;
                        self.from += 1;
                    }
                }
            }
            let rest = bytes.get(self.from..)?;
            let Some(skip) = rest.iter().position(|byte| *byte == mark::EOF) else {
                self.from = bytes.len();
                return None;
            };
            self.from += skip;
            let head = bytes.get(self.from..self.from + HEAD + 2)?;
            let &[_, kind, a, b, c, d, e, f] = head else {
                return None;
            };
            let length = u32::from_be_bytes([a, b, c, d]) as usize;
            if kind == mark::VMDESCRIPTION && [e, f] == *b"{\"" {
                let at = self.from + HEAD;
                self.object = Some(Object {
                    at,
                    end: at.saturating_add(length),
                    depth: 0,
                    in_string: false,
                    escaped: false,
                });
            } else {
                self.from += 1;
            }
        }
    }
}

/// Returns the devices' sections of a device state, without the end mark and the description behind
/// them, which a post-copy's package does not have. `None` when it has none.
pub fn device_sections(device_state: &[u8]) -> Option<&[u8]> {
    let mut finder = EndFinder::default();
    finder.find(device_state)?;
    device_state.get(..finder.from)
}

enum Scan {
    Ended,
    Unfinished,
    Invalid,
}

impl Object {
    /// Tracks strings and nesting up to the declared end.
    fn scan(&mut self, bytes: &[u8]) -> Scan {
        let end = self.end.min(bytes.len());
        for byte in bytes.get(self.at..end).unwrap_or_default() {
            self.at += 1;
            match byte {
                b'\t' | b'\n' | b'\r' if !self.in_string => {}
                0..0x20 => return Scan::Invalid,
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'{' | b'[' if !self.in_string => self.depth += 1,
                b'}' | b']' if !self.in_string => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return if self.at == self.end {
                            Scan::Ended
                        } else {
                            Scan::Invalid
                        };
                    }
                }
                _ => {}
            }
        }
        if self.at == self.end {
            Scan::Invalid
        } else {
            Scan::Unfinished
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(json: &str) -> Vec<u8> {
        let mut bytes = vec![0, 6];
        bytes.extend((json.len() as u32).to_be_bytes());
        bytes.extend(json.as_bytes());
        bytes
    }

    #[test]
    fn the_description_is_found_behind_look_alikes() {
        let mut bytes = b"\x04device".to_vec();
        bytes.extend([0, 6, 0, 6, 0, 0, 6]);
        bytes.extend(described("{\"a\":{}")); // not closed: cannot be the end
        bytes.extend([0, 6, 0xff, 0xff, 0xff, 0xff]);
        bytes.extend(b"{\"never ending");
        bytes.extend([0, 6, 0, 0, 0, 2, b'{', b'"']);
        bytes.extend(described("{\"a\":[1,\"}\\\"\"]}"));
        let mut finder = EndFinder::default();
        for length in 0..bytes.len() {
            assert_eq!(finder.find(&bytes[..length]), None, "{length}");
        }
        assert_eq!(finder.find(&bytes), Some(bytes.len()));
        let length = bytes.len();
        bytes.extend([0; 9]);
        assert_eq!(EndFinder::default().find(&bytes), Some(length));
        let sections = device_sections(&bytes).unwrap();
        let end = described("{\"a\":[1,\"}\\\"\"]}");
        assert_eq!([sections, &end, &[0; 9]].concat(), bytes);
        assert_eq!(device_sections(&bytes[..length - 1]), None);
    }
}
