//! Writes initial RAM file systems: uncompressed cpio archives in the `newc` form.

/// An archive that grows by whole entries.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl Archive {
    /// Adds a folder.
    pub fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, &[]);
    }

    /// Adds an executable file.
    pub fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, PROGRAM, content);
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    /// A header of 6 characters and 13 numbers of 8 hexadecimal digits, the name and its NUL, the
    /// content; name and content are padded to 4 bytes.
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = if mode == FOLDER { 2 } else { 1 };
        let (content_bytes, name_bytes) = (content.len() as u32, name.len() as u32 + 1);
        let fields = [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            content_bytes,
            0,
            0,
            0,
            0,
            name_bytes,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_lie_where_a_reader_looks_for_them() {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.program("init", b"hello");
        let bytes = archive.finish();
        let (mut at, mut names) = (0, Vec::new());
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |number: usize| {
                let start = at + 6 + number * 8;
                let digits = std::str::from_utf8(&bytes[start..start + 8]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (content, name) = (field(6), field(11));
            let name_end = at + 110 + name;
            names.push(String::from_utf8(bytes[at + 110..name_end - 1].to_vec()).unwrap());
            let start = name_end.next_multiple_of(4);
            if names.last().unwrap() == "init" {
                assert_eq!(&bytes[start..start + content], b"hello");
                assert_eq!(field(1), 0o100_755);
            }
            at = (start + content).next_multiple_of(4);
        }
        assert_eq!(names, ["dev", "init", "TRAILER!!!"]);
    }
}
