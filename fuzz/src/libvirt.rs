//! Reads what a daemon of libvirt sends, and what the agent of the other host has from its own:
//! XML, whose paths are replaced, and the strings of messages.

use longhaul_hypervisor::config::HostConfig;
use longhaul_libvirt::manager::Handoff;
use longhaul_libvirt::message::Message;
use longhaul_libvirt::xml::DomainXml;

const CONFIG: &str = r#"{
    "qemu": {"emulators": {"one": "/usr/bin/qemu"}},
    "images": {"web": {"path": "/there/web.qcow2", "format": "qcow2", "local": true}},
    "networks": {"lan": {"bridge": "br7"}},
    "kernels": {"tiny": {"kernel": "/there/vmlinuz"}}
}"#;

/// Reads an input as each of these.
pub(crate) fn run(input: &[u8]) {
    let mut frames = input;
    while let Ok(Some(message)) = Message::read(&mut frames) {
        let frame = message.frame();
        let again = Message::read(&mut frame.as_slice());
        assert_eq!(again.ok().flatten().as_ref(), Some(&message));
    }
    if let Ok(handoff) = Handoff::unpack(input) {
        assert_eq!(handoff.pack().0, input);
    }
    if let Ok(text) = str::from_utf8(input) {
        xml(text);
    }
}

fn xml(text: &str) {
    let Ok(read) = DomainXml::read(text) else {
        return;
    };
    let Ok(there) = serde_json::from_str::<HostConfig>(CONFIG) else {
        return;
    };
    // The names of a domain that this host would know.
    let mut here = there.clone();
    if let Some(image) = here.images.get_mut("web") {
        image.path = "/srv/web.qcow2".into();
    }
    if let Some(kernel) = here.kernels.get_mut("tiny") {
        kernel.kernel = "/boot/vmlinuz".into();
    }
    let Ok(guest) = read.description(&here) else {
        return;
    };
    let _ = longhaul_hypervisor::description::check(&guest);
    let moved = read.with_monitor(&guest, &there, "/run/it's");
    if let Ok(moved) = moved {
        // Whatever was replaced, it is a domain, and the same guest.
        let again = DomainXml::read(&moved).and_then(|xml| xml.description(&there));
        if let Ok(again) = again {
            assert_eq!(again.disks, guest.disks);
        }
    }
}
