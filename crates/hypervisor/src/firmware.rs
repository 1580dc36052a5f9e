//! Firmware that this host's descriptors name, as libvirt chooses it: files of JSON in
//! `/usr/share/qemu/firmware` and `/etc/qemu/firmware` (QEMU, docs/interop/firmware.json).

use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The folders of descriptors. A file in a later one hides those of the same name in earlier ones.
const FOLDERS: [&str; 2] = ["/usr/share/qemu/firmware", "/etc/qemu/firmware"];
/// The maximum number of descriptors in a folder.
const DESCRIPTORS_MAX: usize = 256;
/// The maximum length of a descriptor.
const DESCRIPTOR_BYTES_MAX: u64 = 1 << 20;

/// The firmware of flash that descriptors name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SystemFirmware {
    /// The empty variables, by the code that they are for.
    variables: BTreeMap<PathBuf, Option<PathBuf>>,
}

impl SystemFirmware {
    /// Reads this host's descriptors. Those that cannot be used are left out, and logged.
    pub fn of_this_host() -> Self {
        Self::read(&FOLDERS.map(Path::new))
    }

    /// Firmware of these codes, each with its empty variables.
    pub fn of(firmware: impl IntoIterator<Item = (PathBuf, Option<PathBuf>)>) -> Self {
        Self {
            variables: firmware.into_iter().collect(),
        }
    }

    fn read(folders: &[&Path]) -> Self {
        let mut files = BTreeMap::new();
        for folder in folders {
            match names(folder) {
                Ok(names) => files.extend(names),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let folder = folder.display();
                    tracing::warn!(%folder, %error, "firmware's descriptors cannot be read");
                }
            }
        }
        let mut firmware = Self::default();
        for path in files.into_values() {
            match descriptor(&path) {
                Ok(Some(Mapping {
                    executable: Some(code),
                    nvram_template,
                    ..
                })) => {
                    let variables = nvram_template.map(|file| file.filename);
                    // One code may stand in several descriptors: the first one counts.
                    firmware.variables.entry(code.filename).or_insert(variables);
                }
                Ok(_) => {}
                Err(error) => {
                    let path = path.display();
                    tracing::warn!(%path, %error, "a descriptor of firmware cannot be used");
                }
            }
        }
        firmware
    }

    /// Returns the code of each firmware by a name: that of its file.
    pub fn names(&self) -> impl Iterator<Item = (String, PathBuf)> {
        self.variables.keys().filter_map(|code| {
            let name = code.file_name()?.to_str()?;
            Some((name.to_owned(), code.clone()))
        })
    }

    /// Returns the empty variables for a code.
    pub fn variables_of(&self, code: &Path) -> Option<&Path> {
        self.variables.get(code)?.as_deref()
    }

    /// Returns whether these are the empty variables of a firmware.
    pub fn has_variables(&self, path: &Path) -> bool {
        let mut known = self.variables.values();
        known.any(|known| known.as_deref() == Some(path))
    }
}

/// Returns the descriptors in a folder by their names. An empty file hides one in another folder.
fn names(folder: &Path) -> io::Result<BTreeMap<std::ffi::OsString, PathBuf>> {
    let mut names = BTreeMap::new();
    for entry in fs::read_dir(folder)?.take(DESCRIPTORS_MAX) {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "json")
            && let Some(name) = path.file_name()
        {
            names.insert(name.to_owned(), path.clone());
        }
    }
    Ok(names)
}

/// A descriptor, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Descriptor {
    mapping: Mapping,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Mapping {
    device: String,
    executable: Option<File>,
    nvram_template: Option<File>,
}

#[derive(Debug, Deserialize)]
struct File {
    filename: PathBuf,
}

/// Reads a descriptor; `None` where it is empty, or of firmware that is not in flash.
fn descriptor(path: &Path) -> io::Result<Option<Mapping>> {
    let mut text = String::new();
    let file = fs::File::open(path)?.take(DESCRIPTOR_BYTES_MAX);
    io::BufReader::new(file).read_to_string(&mut text)?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let descriptor: Descriptor = serde_json::from_str(&text).map_err(io::Error::other)?;
    Ok(Some(descriptor.mapping).filter(|mapping| mapping.device == "flash"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_read_and_hidden_by_later_folders() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let flash = |code: &str| {
            format!(
                r#"{{"mapping":{{"device":"flash","executable":{{"filename":"/fw/{code}.fd",
                "format":"raw"}},"nvram-template":{{"filename":"/fw/{code}-vars.fd"}}}}}}"#
            )
        };
        let memory = r#"{"mapping":{"device":"memory","filename":"/fw/bios.fd"}}"#;
        for (folder, name, text) in [
            (0, "10-a.json", flash("a")),
            (0, "20-b.json", flash("b")),
            (0, "30-c.json", memory.to_owned()),
            (0, "40-d.json", "{".to_owned()),
            (0, "50-e.txt", flash("e")),
            (1, "20-b.json", String::new()),
        ] {
            fs::write(folders[folder].path().join(name), text).unwrap();
        }
        let absent = Path::new("/absent");
        let firmware = SystemFirmware::read(&[folders[0].path(), folders[1].path(), absent]);
        let names: Vec<_> = firmware.names().collect();
        assert_eq!(names, [("a.fd".to_owned(), PathBuf::from("/fw/a.fd"))]);
        let variables = Path::new("/fw/a-vars.fd");
        assert_eq!(
            firmware.variables_of(Path::new("/fw/a.fd")),
            Some(variables)
        );
        assert!(firmware.has_variables(variables));
        assert!(!firmware.has_variables(Path::new("/fw/b-vars.fd")));
    }
}
