//! Parses files of `-readconfig`, and puts the options in them in the place of the option.

use super::options::shown;
use crate::observe::Blocker;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The maximum size of a file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The maximum length of a line that QEMU reads.
const LINE_BYTES_MAX: usize = 1023;
/// The maximum length of a name of a group, an id or a key.
const NAME_BYTES_MAX: usize = 63;
/// Groups whose option has another name.
const OPTIONS: [(&str, &str); 4] = [
    ("action", "action"),
    ("boot-opts", "boot"),
    ("memory", "m"),
    ("smp-opts", "smp"),
];

/// Replaces each `-readconfig` by the options in its file, which `read` reads.
pub(super) fn expand(
    words: &[String],
    read: impl Fn(&str) -> io::Result<String>,
) -> (Vec<String>, Vec<Blocker>) {
    let (mut expanded, mut refusals) = (Vec::new(), Vec::new());
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if !matches!(word.as_str(), "-readconfig" | "--readconfig") {
            expanded.push(word.clone());
            continue;
        }
        let path = words.next().map(String::as_str).unwrap_or_default();
        let options = read(path)
            .map_err(|error| error.to_string())
            .and_then(|text| parse(&text));
        match options {
            Ok(options) => expanded.extend(options),
            Err(why) => refusals.push(Blocker {
                text: format!(
                    "its options are also in the file {}, which cannot be read: {why}",
                    shown(path)
                ),
                hint: "put the file back where QEMU read it, or write its content as options"
                    .to_owned(),
            }),
        }
    }
    (expanded, refusals)
}

/// Returns the content of a file that a process named on its command line.
pub(super) fn content(path: &Path) -> io::Result<String> {
    // Opening a pipe must not wait for its other end.
    let file = File::options()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    match text.len() as u64 > FILE_BYTES_MAX {
        true => Err(io::Error::other("it is longer than 1 MiB")),
        false => Ok(text),
    }
}

/// Returns the options of a file as words of a command line.
///
/// ```text
/// # a comment
/// [device "net0"]
///   driver = "virtio-net-pci"
/// ```
fn parse(text: &str) -> Result<Vec<String>, String> {
    let mut sections: Vec<(String, Vec<String>)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = |why: &str| Err(format!("line {}: {why}", number + 1));
        if line.len() > LINE_BYTES_MAX {
            return wrong("it is longer than 1023 bytes");
        }
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            match section(head) {
                Some((group, id)) => {
                    let id = id.map(|id| format!("id={}", escaped(id)));
                    sections.push((group.to_owned(), id.into_iter().collect()));
                }
                None => return wrong("it is no head of a group"),
            }
            continue;
        }
        let (Some((key, value)), Some((_, pairs))) = (pair(line), sections.last_mut()) else {
            return wrong("it is no option of a group");
        };
        pairs.push(format!("{key}={}", escaped(value)));
    }
    let option = |group: &str| {
        let renamed = OPTIONS.iter().find(|(name, _)| *name == group);
        format!("-{}", renamed.map_or(group, |(_, option)| option))
    };
    let words = sections
        .iter()
        .flat_map(|(group, pairs)| [option(group), pairs.join(",")]);
    Ok(words.collect())
}

/// Parses `group]` and `group "id"]`.
fn section(head: &str) -> Option<(&str, Option<&str>)> {
    let (head, rest) = head.split_once(']')?;
    let (group, id) = match head.split_once(' ') {
        Some((group, id)) => (group, Some(id.trim().strip_prefix('"')?.strip_suffix('"')?)),
        None => (head, None),
    };
    let sound = |name: &str| (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains('"');
    let is_option = group
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    let all = sound(group) && is_option && id.is_none_or(sound) && rest.trim().is_empty();
    all.then_some((group, id))
}

/// Parses `key = "value"`.
fn pair(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once('=')?;
    let key = key.trim_end();
    let (value, rest) = value.trim_start().strip_prefix('"')?.split_once('"')?;
    let sound = (1..=NAME_BYTES_MAX).contains(&key.len())
        && !key.contains([' ', '\t', ',', '"'])
        && rest.trim().is_empty();
    sound.then_some((key, value))
}

fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn groups_become_options() {
        let text = "# first\n[machine]\n  type = \"q35\"\n\tusb = \"off\"\n\n[device \"a.b\"]\n\
                    driver = \"virtio-blk-pci\"\nserial = \"a,b\"\n[boot-opts]\nstrict = \"on\"\n\
                    [smp-opts]\ncpus=\"2\"\n\
                    [memory]\nsize = \"\"\n[device]\ndriver = \"usb-ehci\"\n";
        assert_eq!(
            parse(text).unwrap(),
            [
                "-machine",
                "type=q35,usb=off",
                "-device",
                "id=a.b,driver=virtio-blk-pci,serial=a,,b",
                "-boot",
                "strict=on",
                "-smp",
                "cpus=2",
                "-m",
                "size=",
                "-device",
                "driver=usb-ehci",
            ]
        );
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn lines_that_qemu_would_not_take_are_named() {
        for (text, line) in [
            ("driver = \"x\"", 1),
            ("[device]\ndriver = x", 2),
            ("[device\n", 1),
            ("[device \"a]\n", 1),
            ("[]\n", 1),
            ("[-device x]\n", 1),
            ("[device]\n\n = \"a\"", 3),
            ("[device]\na,b = \"a\"", 2),
            (&format!("[device]\na = \"{}\"", "a".repeat(1100)), 2),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.starts_with(&format!("line {line}:")),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn a_file_stands_for_its_options() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"[device \"x\"]\ndriver = \"usb-hub\"\n")
            .unwrap();
        let words: Vec<String> = ["-S", "--readconfig", "here", "-readconfig", "there"]
            .map(str::to_owned)
            .into();
        let (words, refusals) = expand(&words, |path| match path {
            "here" => content(file.path()),
            _ => content(Path::new("/dev/null")),
        });
        assert_eq!(words, ["-S", "-device", "id=x,driver=usb-hub"]);
        assert_eq!(refusals.len(), 1);
        assert!(refusals[0].text.contains("the file there"), "{refusals:?}");
        let (_, refusals) = expand(&["-readconfig".to_owned()], |_| {
            Err(io::Error::other("gone"))
        });
        assert!(refusals[0].text.contains("gone"), "{refusals:?}");
    }
}
