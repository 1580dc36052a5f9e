//! The parts of an image that QEMU reads when it opens it: all of them have to be present before a
//! guest runs on it. All other reads are on behalf of the guest.

use super::{HEAD_BYTES, L1_BYTES_MAX, Qcow2Error, read, unknown, word_at};
use crate::disk::Disk;
use longhaul_protocol::disk::Qcow2;
use std::io;
use std::ops::Range;

/// QEMU opens no image with a longer table of refcounts.
const REFCOUNTS_BYTES_MAX: u64 = 8 << 20;
/// QEMU opens no image with more snapshots or a longer table of them.
const SNAPSHOTS_MAX: u32 = 65536;
const SNAPSHOTS_BYTES_MAX: u64 = 64 << 20;
/// QEMU opens no image with more bitmaps or a longer directory of them.
const BITMAPS_MAX: u32 = 65535;
const DIRECTORY_BYTES_MAX: u64 = 64 << 20;
/// Limit on the total of tables and bitmaps that is followed: they are sent while the guest is
/// stopped.
const BITMAPS_BYTES_MAX: u64 = 1 << 30;
/// The header extension of an image with bitmaps (*bitmaps extension*).
const BITMAPS: u32 = 0x2385_2875;
/// Without this flag the bitmaps are out of date and not read (*autoclear features*).
const BITMAPS_ARE_VALID: u64 = 1;
/// The bits of a bitmap table entry that hold a cluster's offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The fixed part of an entry in the table of snapshots and in the directory of bitmaps.
const SNAPSHOT_BYTES: u64 = 40;
const BITMAP_BYTES: u64 = 24;

/// An image whose references are followed.
struct Following<'a> {
    disk: &'a dyn Disk,
    cluster_bytes: u64,
    visit: &'a mut dyn FnMut(Range<u64>) -> io::Result<()>,
}

/// Visits all ranges of the file that QEMU reads when it opens an image. Each range is visited
/// before its content is read to find the next ones; an error of the visitor ends the walk.
pub fn opened_with(
    disk: &dyn Disk,
    visit: &mut dyn FnMut(Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    let head_bytes = disk.size_bytes().min(HEAD_BYTES as u64);
    visit(0..head_bytes)?;
    let mut head = vec![0; head_bytes as usize];
    disk.read(0, &mut head)?;
    let image = read(&head).map_err(io::Error::other)?.image;
    let mut following = Following {
        disk,
        cluster_bytes: 1 << image.cluster_bits,
        visit,
    };
    following.follow(&head, &image).map(drop)
}

fn long_at(bytes: &[u8], at: usize) -> u64 {
    let word = |at| u64::from(word_at(bytes, at).unwrap_or(0));
    word(at) << 32 | word(at + 4)
}

impl Following<'_> {
    fn follow(&mut self, head: &[u8], image: &Qcow2) -> io::Result<()> {
        let word = |at: usize| word_at(head, at).unwrap_or(0);
        // The header, its extensions, and the name of the backing file.
        self.visit(0, self.cluster_bytes)?;
        self.table(
            "first table",
            long_at(head, 40),
            u64::from(word(36)) * 8,
            L1_BYTES_MAX,
        )?;
        let refcounts = u64::from(word(56)).saturating_mul(self.cluster_bytes);
        self.table(
            "table of refcounts",
            long_at(head, 48),
            refcounts,
            REFCOUNTS_BYTES_MAX,
        )?;
        self.snapshots(long_at(head, 64), word(60))?;
        if image.version == 3 && long_at(head, 88) & BITMAPS_ARE_VALID != 0 {
            let extension = extension(head, BITMAPS);
            if let Some(about) = extension {
                self.bitmaps(about)?;
            }
        }
        Ok(())
    }

    fn visit(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        let end = at.saturating_add(bytes).min(self.disk.size_bytes());
        match at < end {
            true => (self.visit)(at..end),
            false => Ok(()),
        }
    }

    fn table(&mut self, what: &str, at: u64, bytes: u64, bytes_max: u64) -> io::Result<()> {
        let end = at.checked_add(bytes).filter(|_| bytes <= bytes_max);
        if end.is_none_or(|end| end > self.disk.size_bytes()) {
            return damaged(format!("its {what} is out of place"));
        }
        self.visit(at, bytes)
    }

    fn read(&mut self, at: u64, bytes: u64) -> io::Result<Vec<u8>> {
        self.visit(at, bytes)?;
        let mut read = vec![0; bytes as usize];
        self.disk.read(at, &mut read)?;
        Ok(read)
    }

    /// The table of snapshots; their content is read only on request.
    fn snapshots(&mut self, begins: u64, count: u32) -> io::Result<()> {
        let wrong = || damaged("its table of snapshots is damaged");
        if count > SNAPSHOTS_MAX {
            return wrong();
        }
        let mut at = begins;
        for _ in 0..count {
            let ends = at.checked_add(SNAPSHOT_BYTES);
            if ends.is_none_or(|end| end > self.disk.size_bytes()) {
                return wrong();
            }
            let entry = self.read(at, SNAPSHOT_BYTES)?;
            let names = word_at(&entry, 12).unwrap_or(0);
            let names = u64::from(names >> 16) + u64::from(names & 0xffff);
            let extra = u64::from(word_at(&entry, 36).unwrap_or(0));
            let length = (SNAPSHOT_BYTES + extra + names).next_multiple_of(8);
            let end = at.saturating_add(length);
            if end > self.disk.size_bytes() || end - begins > SNAPSHOTS_BYTES_MAX {
                return wrong();
            }
            self.visit(at, length)?;
            at = end;
        }
        Ok(())
    }

    /// Bitmaps are read completely.
    fn bitmaps(&mut self, about: &[u8]) -> io::Result<()> {
        let wrong = || damaged("its directory of bitmaps is damaged");
        let count = word_at(about, 0).unwrap_or(0);
        let (bytes, at) = (long_at(about, 8), long_at(about, 16));
        if about.len() < 24 || count > BITMAPS_MAX {
            return wrong();
        }
        self.table("directory of bitmaps", at, bytes, DIRECTORY_BYTES_MAX)?;
        let directory = self.read(at, bytes)?;
        let (mut entry, mut followed) = (0, 0);
        for _ in 0..count {
            let Some(fixed) = directory.get(entry..entry + BITMAP_BYTES as usize) else {
                return wrong();
            };
            let table_bytes = u64::from(word_at(fixed, 8).unwrap_or(0)) * 8;
            followed += table_bytes;
            if followed > BITMAPS_BYTES_MAX {
                return damaged("its bitmaps are too long");
            }
            let table_at = long_at(fixed, 0);
            self.table(
                "table of a bitmap",
                table_at,
                table_bytes,
                BITMAPS_BYTES_MAX,
            )?;
            let table = self.read(table_at, table_bytes)?;
            for cluster in table.chunks_exact(8) {
                let cluster_at = long_at(cluster, 0) & OFFSET;
                if cluster_at != 0 {
                    followed += self.cluster_bytes;
                    if followed > BITMAPS_BYTES_MAX {
                        return damaged("its bitmaps are too long");
                    }
                    self.visit(cluster_at, self.cluster_bytes)?;
                }
            }
            let name = word_at(fixed, 16).unwrap_or(0) & 0xffff;
            let extra = word_at(fixed, 20).unwrap_or(0);
            let length = BITMAP_BYTES + u64::from(name) + u64::from(extra);
            entry += length.next_multiple_of(8) as usize;
        }
        Ok(())
    }
}

fn damaged(why: impl Into<String>) -> io::Result<()> {
    unknown(why).map_err(|error: Qcow2Error| io::Error::other(error))
}

/// Returns the content of one kind of header extension.
fn extension(head: &[u8], wanted: u32) -> Option<&[u8]> {
    let mut at = word_at(head, 100)? as usize;
    loop {
        let (kind, length) = (word_at(head, at)?, word_at(head, at + 4)? as usize);
        let content = at.checked_add(8)?;
        let content = head.get(content..content.checked_add(length)?)?;
        match kind {
            0 => return None,
            kind if kind == wanted => return Some(content),
            _ => at += 8 + length.next_multiple_of(8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{ExportSize, RawDisk};
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::process::Command;

    fn run(program: &str, words: &[&str], image: &Path) -> String {
        let output = Command::new(program).args(words).arg(image).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn ranges(image: &Path) -> io::Result<Vec<Range<u64>>> {
        let disk = RawDisk::open(image, ExportSize::Bytes(1 << 40)).unwrap();
        let mut ranges = Vec::new();
        opened_with(&disk, &mut |range| {
            ranges.push(range);
            Ok(())
        })?;
        Ok(ranges)
    }

    /// An image with content, snapshots and bitmaps.
    fn made(folder: &Path, options: &str) -> std::path::PathBuf {
        let image = folder.join("image");
        let create = ["create", "-q", "-f", "qcow2", "-o", options];
        let mut qemu_img = Command::new("qemu-img");
        let created = qemu_img.args(create).arg(&image).arg("64M").status();
        assert!(created.unwrap().success());
        let write = |what: &str| drop(run("qemu-io", &["-f", "qcow2", "-c", what], &image));
        write("write -P 7 1M 3M");
        if !options.contains("compat=0.10") {
            for name in ["one", "the-other-one"] {
                let add = ["bitmap", "--add", "-g", "512"];
                let mut qemu_img = Command::new("qemu-img");
                let added = qemu_img.args(add).arg(&image).arg(name).status();
                assert!(added.unwrap().success());
            }
            write("write -P 9 2M 8M");
        }
        for name in ["first", "second with a longer name"] {
            run("qemu-img", &["snapshot", "-c", name], &image);
            write("write -P 11 3M 1M");
        }
        image
    }

    #[test]
    fn qemu_opens_an_image_of_which_nothing_else_is_there() {
        for options in [
            "compat=1.1",
            "compat=0.10",
            "cluster_size=4k",
            "cluster_size=2M",
        ] {
            let folder = tempfile::tempdir().unwrap();
            let image = made(folder.path(), options);
            let about = |path: &Path| {
                let info = run("qemu-img", &["info", "-f", "qcow2", "--output=json"], path);
                let info: serde_json::Value = serde_json::from_str(&info).unwrap();
                let of = &info["format-specific"]["data"];
                assert_eq!(info["snapshots"].as_array().unwrap().len(), 2, "{info}");
                (
                    info["snapshots"].clone(),
                    of.clone(),
                    info["virtual-size"].clone(),
                )
            };
            let expected = about(&image);
            let ranges = ranges(&image).unwrap();
            let bytes = fs::read(&image).unwrap();
            let part = folder.path().join("part");
            let file = File::create(&part).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            let mut there = 0;
            for range in &ranges {
                let end = range.end.min(bytes.len() as u64);
                let content = &bytes[range.start as usize..end as usize];
                file.write_all_at(content, range.start).unwrap();
                there += content.len();
            }
            assert!(there < bytes.len(), "{options}: {there} of {}", bytes.len());
            assert_eq!(about(&part), expected, "{options}");
            // Opened for writing as well, as a guest's image is, so that bitmaps are read.
            run("qemu-io", &["-f", "qcow2", "-c", "quit"], &part);
            if !options.contains("compat=0.10") {
                let bitmaps = &expected.1["bitmaps"];
                assert_eq!(bitmaps.as_array().unwrap().len(), 2);
                let found = |what: &str| {
                    let disk = RawDisk::open_to_read(&image).unwrap();
                    let mut head = vec![0; HEAD_BYTES];
                    disk.read(0, &mut head).unwrap();
                    let at = long_at(extension(&head, BITMAPS).unwrap(), 16);
                    assert!(ranges.iter().any(|range| range.contains(&at)), "{what}");
                };
                found(options);
            }
        }
    }

    #[test]
    fn what_is_not_there_ends_it_where_it_stands() {
        let folder = tempfile::tempdir().unwrap();
        let image = made(folder.path(), "compat=1.1");
        let all = ranges(&image).unwrap();
        let disk = RawDisk::open_to_read(&image).unwrap();
        for missing in &all {
            let mut seen = 0;
            let ended = opened_with(&disk, &mut |range| {
                seen += 1;
                match range.start <= missing.start && missing.start < range.end {
                    true => Err(io::Error::other("missing")),
                    false => Ok(()),
                }
            });
            assert_eq!(ended.unwrap_err().to_string(), "missing");
            assert!(seen <= all.len());
        }
    }

    #[test]
    fn damage_is_an_error_and_never_much_work() {
        let folder = tempfile::tempdir().unwrap();
        let image = made(folder.path(), "compat=1.1");
        let file = File::options().read(true).write(true).open(&image).unwrap();
        // Sizes and offsets of all tables, and of the bitmaps extension.
        for at in 36..320 {
            let mut right = [0];
            file.read_exact_at(&mut right, at).unwrap();
            for byte in [1, 0x7f, 0xff] {
                file.write_all_at(&[byte], at).unwrap();
                match ranges(&image) {
                    Ok(ranges) => assert!(ranges.len() < 1 << 20),
                    Err(error) => assert!(!error.to_string().is_empty()),
                }
            }
            file.write_all_at(&right, at).unwrap();
        }
    }
}
