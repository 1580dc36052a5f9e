//! Finds the version of a guest's emulated TPM: QEMU does not know it, the emulator's command line
//! says it.

use super::command_line;
use crate::tpm::{PROGRAM, VERSIONS};
use std::fs;
use std::path::Path;

/// The flags of a socket that takes connections, in `/proc/net/unix`.
const LISTENS: &str = "00010000";

/// Returns the version of the TPM whose emulator listens at a socket; `None` if it is not found.
pub(super) fn version(socket: &str) -> Option<&'static str> {
    let sockets = fs::read_to_string("/proc/net/unix").ok()?;
    let inode = listening(&sockets, socket)?;
    let opened = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").ok()?;
    let mut pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.find_map(|pid: i32| {
        let mut files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let is_it = |link: &Path| fs::read_link(link).is_ok_and(|to| to.as_os_str() == &*opened);
        let opens = files.any(|file| file.is_ok_and(|file| is_it(&file.path())));
        version_of(&command_line(pid).ok().filter(|_| opens)?)
    })
}

/// Returns the version by the emulator's arguments.
fn version_of(words: &[String]) -> Option<&'static str> {
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    let is_second = words.iter().any(|word| word == "--tpm2");
    program
        .starts_with(PROGRAM)
        .then_some(VERSIONS[usize::from(is_second)])
}

/// Returns the inode of the socket that listens at a path.
fn listening<'a>(sockets: &'a str, path: &str) -> Option<&'a str> {
    sockets.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let flags = fields.nth(3)?;
        let inode = fields.nth(2)?;
        (flags == LISTENS && fields.next() == Some(path)).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulator_s_arguments_say_the_version() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let version = |text| version_of(&words(text));
        assert_eq!(version("/usr/bin/swtpm socket --tpm2 -t"), Some("2.0"));
        assert_eq!(version("swtpm socket --tpmstate dir=/x"), Some("1.2"));
        assert_eq!(version("/usr/sbin/other --tpm2"), None);
    }

    #[test]
    fn only_a_socket_that_listens_there_is_taken() {
        let text = "\
Num       RefCount Protocol Flags    Type St Inode Path
ffff: 00000003 00000000 00000000 0001 03 11 /run/a.tpm
ffff: 00000002 00000000 00010000 0001 01 12 /run/b/run/a.tpm
ffff: 00000002 00000000 00010000 0001 01 13 /run/a.tpm
ffff: 00000002 00000000 00000000 0001 03 14
";
        assert_eq!(listening(text, "/run/a.tpm"), Some("13"));
        assert_eq!(listening(text, "/run/c.tpm"), None);
    }
}
