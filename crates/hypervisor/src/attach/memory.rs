//! Finds a guest's memory objects, plugged memory and plugged vCPUs, and describes them.

use super::describe::Describing;
use super::options::{CommandLine, shown};
use crate::hardware::families::RAM;
use crate::hardware::more::is_cpu;
use crate::observe::{children, property};
use crate::qmp::{Qmp, QmpError};
use longhaul_protocol::hardware::{MemoryBackend, PlacedDevice};
use longhaul_protocol::machine::RamBlock;
use serde_json::Value;
use std::collections::BTreeMap;

/// The start of the kinds of memory objects.
const BACKEND: &str = "memory-backend-";
/// The name of the main memory of a PC without a memory object.
const DEFAULT: &str = "pc.ram";
/// The first version of machines whose RAM blocks have the names of their objects.
const NAMED_BY_ID: (u32, u32) = (4, 0);
const RESTART: &str = "shut the guest down and start it at the destination";

/// What QEMU says of memory objects.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The id of the machine's own.
    main: Option<String>,
    objects: BTreeMap<String, Object>,
    /// Places of plugged memory and vCPUs, by the id of the device.
    plugged: BTreeMap<String, BTreeMap<&'static str, String>>,
}

#[derive(Debug)]
struct Object {
    kind: String,
    bytes: u64,
    share: bool,
}

/// Queries everything without changing anything.
pub(super) async fn look(qmp: &Qmp) -> Result<Memory, QmpError> {
    let main = property(qmp, "/machine", "memory-backend").await?;
    let main = main.as_ref().and_then(Value::as_str).unwrap_or_default();
    let main = main.rsplit('/').next().filter(|id| !id.is_empty());
    let mut memory = Memory {
        main: main.map(str::to_owned),
        ..Memory::default()
    };
    for (id, kind) in children(qmp, "/objects").await? {
        let Some(kind) = kind.strip_prefix(BACKEND) else {
            continue;
        };
        let path = format!("/objects/{id}");
        let bytes = property(qmp, &path, "size").await?;
        let share = property(qmp, &path, "share").await?;
        let object = Object {
            kind: kind.to_owned(),
            bytes: bytes.and_then(|bytes| bytes.as_u64()).unwrap_or_default(),
            share: share == Some(Value::Bool(true)),
        };
        memory.objects.insert(id, object);
    }
    for (id, kind) in children(qmp, "/machine/peripheral").await? {
        let path = format!("/machine/peripheral/{id}");
        let mut place = BTreeMap::new();
        for name in places(&kind) {
            let value = property(qmp, &path, name).await?;
            let value = value.as_ref().and_then(written);
            place.extend(value.map(|value| (*name, value)));
        }
        memory.plugged.insert(id, place);
    }
    Ok(memory)
}

/// Returns the properties that give the place of plugged memory or of a vCPU.
fn places(kind: &str) -> &'static [&'static str] {
    match kind {
        "pc-dimm" => &["addr", "memdev", "node", "slot"],
        kind if is_cpu(kind) => &["core-id", "die-id", "module-id", "socket-id", "thread-id"],
        _ => &[],
    }
}

/// Returns a property's value as an option has it; `None` where it is not set.
fn written(value: &Value) -> Option<String> {
    match value {
        Value::Number(number) if number.as_i64() != Some(-1) => Some(number.to_string()),
        Value::String(path) => path.rsplit('/').next().map(str::to_owned),
        _ => None,
    }
}

impl Memory {
    /// Returns the size of memory that was plugged in, in bytes.
    fn plugged_bytes(&self) -> u64 {
        let objects = self
            .plugged
            .values()
            .filter_map(|place| place.get("memdev"));
        let objects = objects.filter_map(|id| self.objects.get(id));
        objects.map(|object| object.bytes).sum()
    }
}

impl Describing<'_> {
    /// Completes the places of plugged memory and vCPUs.
    pub(super) fn plugged(&self, devices: &mut [PlacedDevice]) {
        let places = &self.found.memory.plugged;
        for device in devices {
            let place = device.id.as_ref().and_then(|id| places.get(id));
            let place = place.into_iter().flatten();
            let place = place.map(|(name, value)| ((*name).to_owned(), value.clone()));
            device.properties.extend(place);
        }
    }

    /// Describes the main memory, and adds the settings of all others.
    pub(super) fn memory(
        &mut self,
        line: &CommandLine,
        settings: &mut BTreeMap<String, String>,
    ) -> Option<MemoryBackend> {
        let found = self.found;
        let main = line.memory_backend.as_ref().or(found.memory.main.as_ref());
        for (id, object) in &found.memory.objects {
            // A block without a name is used by nothing.
            let block = self.block(id).filter(|_| Some(id) != main);
            let Some((pages, by_path)) = block else {
                continue;
            };
            let Some(kind) = self.kind(id, object) else {
                continue;
            };
            let mut pairs = vec![
                ("id", id.clone()),
                ("kind", kind_of(kind, pages).to_owned()),
                ("share", if object.share { "on" } else { "off" }.to_owned()),
                ("size", object.bytes.to_string()),
            ];
            pairs.extend(pages.map(|pages| ("huge-page-mib", pages.to_string())));
            pairs.extend(self.named_by(by_path).map(|by| ("named-by", by.to_owned())));
            let pairs = pairs
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value));
            RAM.add(settings, pairs);
        }
        let id = main?;
        let named = line.memory_backend.is_some() || id != DEFAULT;
        let Some(object) = found.memory.objects.get(id) else {
            if named {
                self.refuse(
                    format!("memory object {} is not in QEMU", shown(id)),
                    RESTART,
                );
            }
            return None;
        };
        let kind = self.kind(id, object)?;
        let (pages, by_path) = self.block(id)?;
        if !named && pages.is_none() {
            return None;
        }
        if let Some(by) = self.named_by(by_path) {
            settings.insert("memory.named-by".to_owned(), by.to_owned());
        }
        Some(MemoryBackend {
            id: id.clone(),
            memfd: kind_of(kind, pages) == "memfd",
            share: object.share,
            huge_page_mib: pages,
        })
    }

    /// Returns the kind of object that takes the place of this one.
    fn kind(&mut self, id: &str, object: &Object) -> Option<&'static str> {
        match object.kind.as_str() {
            // The content of a file of this host moves, and not the file.
            "file" | "memfd" | "shm" => Some("memfd"),
            "ram" => Some("ram"),
            kind => {
                self.refuse(
                    format!("memory object {} is of kind {}", shown(id), shown(kind)),
                    "use -object memory-backend-memfd",
                );
                None
            }
        }
    }

    /// Returns the size of the pages of an object's RAM block if they are huge, and whether it has
    /// the object's path as its name.
    fn block(&self, id: &str) -> Option<(Option<u32>, bool)> {
        let blocks = &self.found.machine.ram_blocks;
        let by_path = blocks.get(&format!("/objects/{id}"));
        let by_path = by_path.map(|block| (huge_page_mib(block), true));
        by_path.or_else(|| blocks.get(id).map(|block| (huge_page_mib(block), false)))
    }

    /// Returns what an object's RAM block is named by, where that is not what follows from the
    /// machine's version.
    fn named_by(&self, by_path: bool) -> Option<&'static str> {
        let version = self.found.machine.machine_type.rsplit('-').next();
        let mut numbers = version.unwrap_or_default().split('.');
        let mut number = || numbers.next().and_then(|part| part.parse::<u32>().ok());
        let old = (number().unwrap_or(u32::MAX), number().unwrap_or(0)) < NAMED_BY_ID;
        (old != by_path).then_some(if by_path { "path" } else { "id" })
    }

    /// Returns the settings of vCPUs and memory that can be plugged in.
    pub(super) fn spare(&mut self, settings: &mut BTreeMap<String, String>) {
        let absent = self.found.absent_vcpus;
        if absent > 0 {
            let all = u64::from(self.found.machine.vcpus) + absent as u64;
            settings.insert("smp.maxcpus".to_owned(), all.to_string());
        }
        let plugged = self.found.memory.plugged_bytes();
        if plugged > 0 && !settings.contains_key("memory.maxmem") {
            self.refuse("memory was plugged into it unseen".to_owned(), RESTART);
        }
    }
}

/// Returns the size of a block's pages, if they are huge.
fn huge_page_mib(block: &RamBlock) -> Option<u32> {
    let mib = u32::try_from(block.page_bytes >> 20).ok()?;
    (mib > 0).then_some(mib)
}

/// Huge pages are those of a memfd, wherever they come from here.
fn kind_of(kind: &'static str, huge_page_mib: Option<u32>) -> &'static str {
    if huge_page_mib.is_some() {
        "memfd"
    } else {
        kind
    }
}
