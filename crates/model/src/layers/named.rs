use burn::module::{
    AutodiffModule, Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor,
};
use burn::tensor::backend::{AutodiffBackend, Backend};

/// The container name that visitors see.
const CONTAINER: &str = "Named";

/// Modules of one type whose names are known only at run time.
///
/// To a visitor they are fields of the module that holds the collection: a weight is called
/// `attention.forget_gate.weight`, not `attention.extra.0.weight`.
#[derive(Clone, Debug)]
pub struct Named<M> {
    /// The field that holds the collection.
    field: &'static str,
    parts: Vec<(&'static str, M)>,
}

impl<M> Named<M> {
    /// The modules `parts`, held by the field `field`.
    pub(super) fn new(
        field: &'static str,
        parts: impl IntoIterator<Item = (&'static str, M)>,
    ) -> Self {
        Named { field, parts: parts.into_iter().collect() }
    }

    /// The names, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &'static str> {
        self.parts.iter().map(|(name, _)| *name)
    }

    /// The modules, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &M> {
        self.parts.iter().map(|(_, part)| part)
    }

    /// The module called `name`.
    pub fn get(&self, name: &str) -> Option<&M> {
        self.parts.iter().find(|(other, _)| *other == name).map(|(_, part)| part)
    }

    /// The module called `name`.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut M> {
        self.parts.iter_mut().find(|(other, _)| *other == name).map(|(_, part)| part)
    }

    /// The same names with other modules.
    fn with<N>(&self, parts: impl Iterator<Item = N>) -> Named<N> {
        Named { field: self.field, parts: self.names().zip(parts).collect() }
    }

    fn each<N>(self, f: impl FnMut(M) -> N) -> Named<N> {
        let (names, parts): (Vec<_>, Vec<_>) = self.parts.into_iter().unzip();
        Named {
            field: self.field,
            parts: names.into_iter().zip(parts.into_iter().map(f)).collect(),
        }
    }
}

impl<B: Backend, M: Module<B>> Module<B> for Named<M> {
    type Record = Vec<M::Record>;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.iter().fold(devices, |devices, part| part.collect_devices(devices))
    }

    fn fork(self, device: &B::Device) -> Self {
        self.each(|part| part.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        self.each(|part| part.to_device(device))
    }

    /// Exits the field that holds the collection while it visits the parts, so that their names
    /// replace the field's.
    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        visitor.exit_module(self.field, CONTAINER);
        for (name, part) in &self.parts {
            visitor.enter_module(name, CONTAINER);
            part.visit(visitor);
            visitor.exit_module(name, CONTAINER);
        }
        visitor.enter_module(self.field, CONTAINER);
    }

    /// As [`Module::visit`].
    fn map<V: ModuleMapper<B>>(self, mapper: &mut V) -> Self {
        let Named { field, parts } = self;
        mapper.exit_module(field, CONTAINER);
        let map = |(name, part): (&'static str, M)| {
            mapper.enter_module(name, CONTAINER);
            let part = part.map(mapper);
            mapper.exit_module(name, CONTAINER);
            (name, part)
        };
        let parts = parts.into_iter().map(map).collect();
        mapper.enter_module(field, CONTAINER);
        Named { field, parts }
    }

    fn load_record(self, record: Self::Record) -> Self {
        assert_eq!(self.parts.len(), record.len(), "a record of as many parts");
        let mut records = record.into_iter();
        self.each(|part| match records.next() {
            Some(record) => part.load_record(record),
            None => part,
        })
    }

    fn into_record(self) -> Self::Record {
        self.parts.into_iter().map(|(_, part)| part.into_record()).collect()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> AutodiffModule<B> for Named<M> {
    type InnerModule = Named<M::InnerModule>;

    fn valid(&self) -> Self::InnerModule {
        self.with(self.iter().map(AutodiffModule::valid))
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        module.each(M::from_inner)
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Named<M> {
    fn content(&self, content: Content) -> Option<Content> {
        let add = |content: Content, (name, part): &(&str, M)| content.add(name, part);
        self.parts.iter().fold(content, add).optional()
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Named<M> {}
