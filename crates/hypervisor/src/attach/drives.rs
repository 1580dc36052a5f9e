//! Interprets QEMU's words about disks: `-drive`, `-blockdev`, and the names that disks get.

use super::more_options::is_limit;
use super::options::shown;
use super::words::Words;
use crate::description::is_name;
use crate::hardware::tables::{Bus, Model, Serves};
use crate::observe::Blocker;
use longhaul_protocol::guest::Disk;

/// The maximum length of a disk's name.
const NAME_BYTES_MAX: usize = 16;
const WITHOUT: &str = "start the guest without it";

/// Settings of nodes that concern this host only, or that QEMU reports.
const NODE: [&str; 30] = [
    "aio",
    "aio-max-batch",
    "auto-read-only",
    "cache-clean-interval",
    "cache-size",
    "detect-zeroes",
    "direct",
    "discard",
    "discard-no-unref",
    "driver",
    "filename",
    "force-share",
    "l2-cache-entry-size",
    "l2-cache-size",
    "lazy-refcounts",
    "locking",
    "no-flush",
    "node-name",
    "overlap-check",
    "pass-discard-other",
    "pass-discard-request",
    "pass-discard-snapshot",
    "read-only",
    "refcount-cache-size",
    // Whether that is all of the file is asked.
    "size",
    "throttle-group",
    // Parts of these are further settings.
    "backing",
    "cache",
    "file",
    "overlap-check.template",
];
/// Drivers of nodes that QEMU's block graph is asked about.
const DRIVERS: [&str; 6] = [
    "copy-on-read",
    "file",
    "host_device",
    "qcow2",
    "raw",
    "throttle",
];

/// Returns the reasons why the node of a `-blockdev` cannot be made elsewhere.
pub(super) fn node(words: &Words) -> Vec<Blocker> {
    let mut refusals = Vec::new();
    for (key, value) in words.iter() {
        let last = key.rsplit('.').next().unwrap_or(key);
        if !NODE.contains(&last) && !NODE.contains(&key) {
            refusals.push(refuse(
                format!("-blockdev setting {} is not known", shown(key)),
                WITHOUT,
            ));
        } else if last == "driver" && !DRIVERS.contains(&value) {
            refusals.push(refuse(
                format!("-blockdev driver {} cannot be moved", shown(value)),
                "give the guest a raw or qcow2 image, or a volume",
            ));
        }
    }
    refusals
}

/// Returns the reasons why a `-drive` cannot be made elsewhere.
pub(super) fn drive(words: &Words) -> Vec<Blocker> {
    const LOCAL: [&str; 14] = [
        "bus",
        "cache.writeback",
        "copy-on-read",
        "file",
        "format",
        "id",
        "if",
        "index",
        "media",
        "readonly",
        "rerror",
        "snapshot",
        "unit",
        "werror",
    ];
    let mut refusals = Vec::new();
    for (key, value) in words.iter() {
        let last = key.rsplit('.').next().unwrap_or(key);
        match key {
            "snapshot" if value == "off" => {}
            "snapshot" => refusals.push(refuse(
                "option -drive snapshot=on: what the guest writes is in a hidden file of this host"
                    .to_owned(),
                WITHOUT,
            )),
            key if LOCAL.contains(&key) || NODE.contains(&last) || is_limit(key) => {}
            key => refusals.push(refuse(
                format!("-drive setting {} is not known", shown(key)),
                WITHOUT,
            )),
        }
    }
    refusals
}

/// Returns the words of the `-drive` that made a disk: by its name in QEMU, else by its file.
pub(super) fn of<'a>(drives: &'a [Words], drive: &str, file: Option<&str>) -> Option<&'a Words> {
    if drive.is_empty() {
        return None;
    }
    let named = drives.iter().find(|words| words.get("id") == Some(drive));
    named.or_else(|| {
        let has = |words: &&Words| {
            let own = words.get("file").or(words.get("file.filename"));
            words.get("id").is_none() && own.is_some() && own == file
        };
        drives.iter().find(has)
    })
}

/// Returns the properties of a device that a `-drive` sets in its stead.
pub(super) fn properties(words: &Words) -> Vec<(&'static str, &str)> {
    let mut properties = Vec::new();
    for name in ["werror", "rerror"] {
        properties.extend(words.get(name).map(|value| (name, value)));
    }
    let writes_through = matches!(words.get("cache"), Some("writethrough" | "directsync"))
        || words.get("cache.writeback") == Some("off");
    properties.extend(writes_through.then_some(("write-cache", "off")));
    properties
}

/// Returns a name for a disk that its device does not give: like those of a Linux guest, in the
/// order of the devices.
pub(super) fn name(id: Option<&str>, model: &Model, bus: Option<&str>, disks: &[Disk]) -> String {
    let taken = |name: &str| disks.iter().any(|disk| disk.name == name);
    if let Some(id) = id.filter(|id| is_name(id, NAME_BYTES_MAX) && !taken(id)) {
        return id.to_owned();
    }
    // The first buses of the board are called so.
    let letters = match (model.serves, model.bus) {
        (Serves::Medium, Bus::Other) => "fd",
        (Serves::Medium, _) => "cd",
        (_, Bus::Pci) => "vd",
        (_, Bus::Ide) if matches!(bus, Some("ide.0" | "ide.1")) => "hd",
        _ => "sd",
    };
    let nth = |number: usize| match (letters, u8::try_from(number)) {
        ("cd" | "fd", _) => format!("{letters}{number}"),
        (_, Ok(letter)) if letter < 26 => format!("{letters}{}", char::from(b'a' + letter)),
        _ => format!("{letters}{number}"),
    };
    let mut names = (0..=disks.len()).map(nth);
    let free = names.find(|name| !taken(name));
    free.unwrap_or_else(|| format!("disk{}", disks.len()))
}

fn refuse(text: String, hint: &str) -> Blocker {
    Blocker {
        text,
        hint: hint.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Words {
        Words::read(text, "file")
    }

    #[test]
    fn the_drive_of_a_disk_is_found() {
        let drives = [
            words("file=a.raw,if=virtio,werror=stop"),
            words("if=none,id=h1,file=b.raw,cache=writethrough"),
            words("if=none,id=h2,file=a.raw"),
        ];
        let found = of(&drives, "h1", Some("b.raw")).unwrap();
        assert_eq!(properties(found), [("write-cache", "off")]);
        let found = of(&drives, "virtio0", Some("a.raw")).unwrap();
        assert_eq!(properties(found), [("werror", "stop")]);
        // A node of -blockdev has no drive, whatever its file is.
        assert!(of(&drives, "", Some("a.raw")).is_none());
        assert!(of(&drives, "h3", Some("c.raw")).is_none());
    }

    #[test]
    fn disks_without_an_id_get_names() {
        let virtio = Model::of("virtio-blk-pci").unwrap();
        let (ide, cd) = (Model::of("ide-hd").unwrap(), Model::of("ide-cd").unwrap());
        let mut disks = Vec::new();
        for (id, model, bus, expected) in [
            (None, virtio, "pci.0", "vda"),
            (Some("vdb"), virtio, "pci.0", "vdb"),
            (None, virtio, "pci.0", "vdc"),
            (Some("ua-839818aa-ca63-4c03"), virtio, "pci.0", "vdd"),
            (Some("vda"), virtio, "pci.0", "vde"),
            (None, ide, "ide.1", "hda"),
            (None, ide, "ide.2", "sda"),
            (None, cd, "ide.1", "cd0"),
            (None, cd, "ide.1", "cd1"),
        ] {
            let name = name(id, model, Some(bus), &disks);
            assert_eq!(name, expected);
            disks.push(Disk {
                name,
                image: String::new(),
                shared: false,
                read_only: false,
            });
        }
    }

    #[test]
    fn settings_of_drives_are_known_or_named() {
        let fine = "file=a,if=ide,index=0,media=disk,cache.direct=on,file.locking=off,snapshot=off,\
                    copy-on-read=on";
        assert_eq!(drive(&words(fine)), []);
        for (text, expected) in [
            ("file=a,snapshot=on", "option -drive snapshot=on"),
            ("file=a,frobnicate=1", "-drive setting frobnicate"),
            ("file=a,offset=512", "-drive setting offset"),
        ] {
            let refusals = drive(&words(text));
            assert!(refusals[0].text.starts_with(expected), "{refusals:?}");
        }
        let nested = "driver=qcow2,node-name=d,file.driver=file,file.filename=a,cache.direct=on";
        assert_eq!(node(&words(nested)), []);
        for (text, expected) in [
            ("driver=raw,offset=1,file=a", "-blockdev setting offset"),
            ("driver=qcow2,file.driver=rbd", "-blockdev driver rbd"),
        ] {
            let refusals = node(&words(text));
            assert!(refusals[0].text.starts_with(expected), "{refusals:?}");
        }
    }
}
