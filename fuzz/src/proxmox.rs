//! Reads what the agent of another host has of a guest of Proxmox VE: its file, which this host
//! would write and carry out as root, and the names of its volumes.

use longhaul_proxmox::accept;
use longhaul_proxmox::config::GuestConfig;
use longhaul_proxmox::device::{Card, Content, Drive};
use longhaul_proxmox::manager::Handoff;
use longhaul_proxmox::names::VolumeName;
use longhaul_proxmox::storage::Storages;
use std::path::Component;

/// Reads an input as each of these.
pub(crate) fn run(input: &[u8]) {
    if let Ok(handoff) = Handoff::unpack(input) {
        assert_eq!(Handoff::unpack(&handoff.pack().0), Ok(handoff.clone()));
        file(&handoff.config);
    }
    let Ok(text) = str::from_utf8(input) else {
        return;
    };
    file(text);
    if let Some(name) = VolumeName::read(text) {
        assert_eq!(name.to_string(), text);
    }
    // No volume is outside of its storage.
    let storages = Storages::read("dir: local\n\tpath /vz\nlvm: tank\n\tvgname g\n");
    let _ = Storages::read(text);
    for storage in storages.all() {
        let Some(path) = storage.path(text) else {
            continue;
        };
        assert!(!path.components().any(|part| part == Component::ParentDir));
        assert!(path.is_absolute());
    }
}

fn file(text: &str) {
    let Ok(config) = GuestConfig::read(text) else {
        return;
    };
    let written = config.to_string();
    let again = GuestConfig::read(&written);
    assert_eq!(again.as_ref(), Ok(&config));
    let Ok(config) = accept::read_foreign(text) else {
        return;
    };
    assert_eq!(config.get("args"), None);
    assert_eq!(config.get("hookscript"), None);
    for (key, value) in config.settings() {
        if let Some(drive) = Drive::read(value).filter(|_| longhaul_proxmox::device::is_drive(key))
        {
            assert!(!matches!(
                drive.content,
                Content::Path(_) | Content::HostDrive
            ));
            let other = drive.with_volume("tank", "vm-1-disk-0");
            assert!(Drive::read(&other).is_some());
        }
        if let Some(card) = Card::read(value).filter(|_| longhaul_proxmox::device::is_card(key)) {
            let other = card.with_bridge("vmbr9");
            assert_eq!(
                Card::read(&other).and_then(|card| card.bridge),
                Some("vmbr9")
            );
        }
    }
}
