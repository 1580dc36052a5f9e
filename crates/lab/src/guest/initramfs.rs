//! Builds the `tiny` guest's initial RAM file system: the arena, its workloads and the kernel
//! modules they need.

use super::cpio::Archive;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The arena as a static program, for any guest.
pub const ARENA: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/arena"));
/// The program that runs a history on a guest's disks, as a workload beside the arena.
pub(super) const HISTORY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/history"));
/// The folder of workloads in the `tiny` guest.
pub const WORKLOADS: &str = "/workloads";
/// The name of that program's workload.
pub const HISTORY_NAME: &str = "history";
/// The program that writes files beside QEMU's guest agent, as a workload.
pub(super) const FILES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/files"));
/// The name of that program's workload.
pub const FILES_NAME: &str = "files";

/// The drivers of the guest's channel, disks, network and balloon, which reports unused pages.
const NEEDED: [&str; 5] = [
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "virtio_net",
    "virtio_balloon",
];

/// Why the initial RAM file system could not be built.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A file or folder could not be read.
    #[error("{}: {source}; scripts/install lab unpacks the guests' kernel", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Modules that depend on each other, or a module of an unknown format.
    #[error("{module}: {problem}; scripts/install lab unpacks the guests' kernel")]
    Module {
        /// The module.
        module: String,
        /// The error.
        problem: &'static str,
    },
}

/// Returns the archive for a kernel with modules under `modules`, such as `/lib/modules/6.1.0-1`,
/// with these programs as workloads, and these files of the host.
pub fn build(
    modules: &Path,
    workloads: &[(&str, &[u8])],
    files: &[(PathBuf, PathBuf)],
) -> Result<Vec<u8>, InitramfsError> {
    let mut available = BTreeMap::new();
    find_modules(&modules.join("kernel"), &mut available)?;
    let builtin = builtin(modules)?;
    let mut order = Vec::new();
    for name in NEEDED {
        // A driver that is not a module is part of the kernel.
        require(name, &available, &builtin, &mut order, 0)?;
    }
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "modules"] {
        archive.folder(folder);
    }
    for (number, path) in order.iter().enumerate() {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        archive.program(&format!("modules/{number:02}-{file}"), &read(path)?);
    }
    archive.program("init", ARENA);
    if !workloads.is_empty() {
        // Names in archives have no leading slash.
        let folder = WORKLOADS.trim_start_matches('/');
        archive.folder("run");
        archive.folder(folder);
        for (name, program) in workloads {
            archive.program(&format!("{folder}/{name}"), program);
        }
    }
    let mut folders = BTreeSet::new();
    for (place, file) in files {
        let place = place.strip_prefix("/").unwrap_or(place);
        let mut above: Vec<&Path> = place.ancestors().skip(1).collect();
        above.reverse();
        for folder in above {
            if !folder.as_os_str().is_empty() && folders.insert(folder) {
                archive.folder(&folder.display().to_string());
            }
        }
        archive.program(&place.display().to_string(), &read(file)?);
    }
    Ok(archive.finish())
}

/// Appends a module after everything that it depends on.
fn require(
    name: &str,
    available: &BTreeMap<String, PathBuf>,
    builtin: &[String],
    order: &mut Vec<PathBuf>,
    depth: usize,
) -> Result<(), InitramfsError> {
    let problem = |problem| InitramfsError::Module {
        module: name.to_owned(),
        problem,
    };
    let Some(path) = available.get(name) else {
        return if builtin.iter().any(|module| module == name) {
            Ok(())
        } else {
            Err(problem("the kernel has no such module"))
        };
    };
    if depth > 16 {
        return Err(problem("its dependencies have no end"));
    }
    if order.contains(path) {
        return Ok(());
    }
    for dependency in dependencies(&read(path)?).ok_or(problem("no readable kernel module"))? {
        require(&dependency, available, builtin, order, depth + 1)?;
    }
    order.push(path.clone());
    Ok(())
}

/// Returns the names after `depends=` in a module's `.modinfo`; packages lack `modules.dep`, which
/// is generated at their installation.
fn dependencies(module: &[u8]) -> Option<Vec<String>> {
    const KEY: &[u8] = b"\0depends=";
    let start = module.windows(KEY.len()).position(|window| window == KEY)? + KEY.len();
    let rest = module.get(start..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    let names = std::str::from_utf8(&rest[..end]).ok()?;
    Some(
        names
            .split(',')
            .filter(|name| !name.is_empty())
            .map(normal)
            .collect(),
    )
}

fn find_modules(
    folder: &Path,
    found: &mut BTreeMap<String, PathBuf>,
) -> Result<(), InitramfsError> {
    let failed = |source| InitramfsError::Read {
        path: folder.to_owned(),
        source,
    };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if entry.file_type().map_err(failed)?.is_dir() {
            find_modules(&path, found)?;
        } else if let Some(name) = module_name(&path) {
            found.insert(name, path);
        }
    }
    Ok(())
}

fn builtin(modules: &Path) -> Result<Vec<String>, InitramfsError> {
    let path = modules.join("modules.builtin");
    let list = read(&path)?;
    let list = String::from_utf8_lossy(&list);
    Ok(list
        .lines()
        .filter_map(|line| module_name(Path::new(line)))
        .collect())
}

fn module_name(path: &Path) -> Option<String> {
    path.file_name()?.to_str()?.strip_suffix(".ko").map(normal)
}

fn normal(name: &str) -> String {
    name.replace('-', "_")
}

fn read(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    fs::read(path).map_err(|source| InitramfsError::Read {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("kernel/drivers");
        fs::create_dir_all(&kernel).unwrap();
        for (file, depends) in [
            ("virtio_pci.ko", "virtio,virtio_ring"),
            ("virtio-ring.ko", "virtio"),
            ("virtio.ko", ""),
            ("virtio_blk.ko", "virtio_ring"),
            ("virtio_net.ko", "virtio_ring"),
        ] {
            fs::write(
                kernel.join(file),
                format!("ELF\0depends={depends}\0name=x\0"),
            )
            .unwrap();
        }
        let list =
            "kernel/drivers/char/virtio_console.ko\nkernel/drivers/virtio/virtio_balloon.ko\n";
        fs::write(folder.path().join("modules.builtin"), list).unwrap();
        let archive = build(folder.path(), &[], &[]).unwrap();
        let at = |name: &str| {
            archive
                .windows(name.len())
                .position(|window| window == name.as_bytes())
                .unwrap()
        };
        assert!(at("modules/00-virtio.ko") < at("modules/01-virtio-ring.ko"));
        assert!(at("modules/01-virtio-ring.ko") < at("modules/02-virtio_pci.ko"));
        assert!(at("modules/03-virtio_blk.ko") < at("init"));
        fs::write(folder.path().join("modules.builtin"), "").unwrap();
        let error = build(folder.path(), &[], &[]).unwrap_err().to_string();
        assert!(
            error.starts_with("virtio_console: the kernel has no such module"),
            "{error}"
        );
    }
}
