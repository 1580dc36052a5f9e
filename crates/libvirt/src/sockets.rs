//! Sockets between this process and the QEMUs of a daemon, whatever confines these.
//!
//! ```text
//! /run/libvirt/longhaul/WHAT.tunnelmigrate.dest.DOMAIN        made by this process
//! /run/libvirt/longhaul/qemu/WHAT.tunnelmigrate.dest.DOMAIN   made by QEMU
//! ```
//!
//! libvirt's AppArmor profile of a domain lets its QEMU use sockets of these names in all folders
//! below `/run/libvirt`, for libvirt's own tunnels (`virt-aa-helper`).

use crate::connection::Connection;
use longhaul_hypervisor::manager::SocketPlace;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// The folder, in the daemon's mounts. A daemon of a test has its own ones.
const SEEN: &str = "/run/libvirt/longhaul";
/// The folder in it for the sockets that QEMUs make.
const OF_QEMU: &str = "qemu";

/// Returns where the QEMU of a domain can connect to sockets of this process.
pub(crate) fn ours(connection: &Connection, domain: &str) -> SocketPlace {
    let beside = connection.path().parent().unwrap_or(Path::new("/"));
    at(beside.join("longhaul"), domain)
}

fn at(folder: PathBuf, domain: &str) -> SocketPlace {
    SocketPlace {
        folder,
        seen: SEEN.into(),
        end: format!(".tunnelmigrate.dest.{domain}"),
    }
}

/// Returns QEMU's path of a socket that it makes.
pub(crate) fn made_by_qemu_as_seen(what: &str, domain: &str) -> PathBuf {
    made_by_qemu(&at(SEEN.into(), domain)).theirs(what)
}

/// Returns where a QEMU can make sockets.
pub(crate) fn made_by_qemu(ours: &SocketPlace) -> SocketPlace {
    SocketPlace {
        folder: ours.folder.join(OF_QEMU),
        seen: ours.seen.join(OF_QEMU),
        end: ours.end.clone(),
    }
}

/// Makes the folder of [`made_by_qemu`], for the account of the daemon's QEMUs.
pub(crate) fn make_for_qemu(connection: &Connection, ours: &SocketPlace) -> Result<(), String> {
    let account = connection.account_of_qemu();
    let account = account.map_err(|error| error.to_string())?;
    let folder = made_by_qemu(ours).folder;
    let made = || {
        ours.make()?;
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // Only this account can change what is above it, so it is what was made here.
        let is = fs::symlink_metadata(&folder)?;
        if let Some((uid, gid)) = account
            && (is.uid(), is.gid()) != (uid, gid)
        {
            chown(&folder, Some(uid), Some(gid))?;
        }
        fs::set_permissions(&folder, Permissions::from_mode(0o700))
    };
    made().map_err(|error| format!("cannot make {}: {error}", folder.display()))
}
