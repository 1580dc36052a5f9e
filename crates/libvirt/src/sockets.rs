//! Sockets between this process and the QEMUs of a daemon, whatever confines these.
//!
//! ```text
//! /run/libvirt/longhaul/WHAT.tunnelmigrate.dest.DOMAIN        made by this process
//! /run/libvirt/longhaul/qemu/WHAT.tunnelmigrate.dest.DOMAIN   made by QEMU
//! ```
//!
//! libvirt's AppArmor profile of a domain lets its QEMU use sockets of these names in all folders
//! below `/run/libvirt`, for libvirt's own tunnels (`virt-aa-helper`).

use crate::connection::{Connection, LibvirtError, Procedure};
use crate::xdr::Writer;
use longhaul_hypervisor::manager::SocketPlace;
use roxmltree::Document;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::Path;

const CONNECT_GET_CAPABILITIES: Procedure = Procedure::remote(7, "CONNECT_GET_CAPABILITIES");
/// The folder, in the daemon's mounts. A daemon of a test has its own ones.
const SEEN: &str = "/run/libvirt/longhaul";
/// The folder in it for the sockets that QEMUs make.
const OF_QEMU: &str = "qemu";

/// Returns where the QEMU of a domain can connect to sockets of this process.
pub(crate) fn ours(connection: &Connection, domain: &str) -> SocketPlace {
    let beside = connection.path().parent().unwrap_or(Path::new("/"));
    SocketPlace {
        folder: beside.join("longhaul"),
        seen: SEEN.into(),
        end: format!(".tunnelmigrate.dest.{domain}"),
    }
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

impl Connection {
    /// Returns the user and the group of the daemon's QEMUs, if it changes them.
    ///
    /// # Errors
    /// When libvirt does not answer.
    pub fn account_of_qemu(&self) -> Result<Option<(u32, u32)>, LibvirtError> {
        let capabilities = self.ask(CONNECT_GET_CAPABILITIES, Writer::default(), |it| {
            it.text().map(str::to_owned)
        })?;
        Ok(account(&capabilities))
    }
}

/// Reads the account in a document of libvirt's capabilities: the base label of its security model
/// `dac`, such as `+64055:+106`.
fn account(capabilities: &str) -> Option<(u32, u32)> {
    let document = Document::parse(capabilities).ok()?;
    let models = document
        .descendants()
        .filter(|it| it.has_tag_name("secmodel"));
    let text = |node: roxmltree::Node<'_, '_>, name: &str| {
        let child = node.children().find(|it| it.has_tag_name(name))?;
        child.text().map(str::to_owned)
    };
    let mut models = models.filter(|model| text(*model, "model").as_deref() == Some("dac"));
    let label = text(models.next()?, "baselabel")?;
    let (user, group) = label.split_once(':')?;
    let number = |text: &str| text.trim_start_matches('+').parse().ok();
    Some((number(user)?, number(group)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_read_from_capabilities() {
        let text = "<capabilities><host><secmodel><model>apparmor</model><doi>0</doi></secmodel>\
                    <secmodel><model>dac</model><doi>0</doi>\
                    <baselabel type='kvm'>+64055:+106</baselabel>\
                    <baselabel type='qemu'>+64055:+106</baselabel></secmodel></host>\
                    </capabilities>";
        assert_eq!(account(text), Some((64055, 106)));
        assert_eq!(account("<capabilities/>"), None);
        assert_eq!(account("no XML"), None);
    }
}
